"""A checkpoint's tokenizer as the files that a bundle keeps, and what is odd about it.

What tokenizer.json and the files beside it leave out, transformers is asked for: the vocabulary of
a folder without tokenizer.json, and the end token that only a tokenizer's class names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.data.tokenizer_files import (
    CONFIG,
    DEFAULT,
    GENERATION,
    RANDOM,
    SMALL_FILES,
    TEMPLATE_SUFFIX,
    TEMPLATES,
    VOCABULARY,
    WITH_TOOLS,
    MoreToken,
    added_in,
    numbered,
    special_of,
    templates_of,
    tokenizer_files,
)

_PIECES = ("tokenizer.model", "spiece.model")  # of SentencePiece
_WORDS, _MERGES = "vocab.json", "merges.txt"
_OTHERS = ("tekken.json", "tiktoken.model", "vocab.txt", "sentencepiece.bpe.model")
HUB_FILES = (
    *(VOCABULARY, *SMALL_FILES, f"{TEMPLATES}/*{TEMPLATE_SUFFIX}"),
    *(_WORDS, _MERGES, *_PIECES, *_OTHERS),
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# numbers of tokens in a model's settings, and what follows where there are no such tokens
_IDS = {
    "eos_token_id": "no answer ends with it",
    "bos_token_id": "no text begins with it",
    "pad_token_id": "nothing is padded with it here, and elsewhere it fails",
}
_SHOWN = 3  # tokens in a message
UNREADABLE = "the tokenizer cannot be read, nor any text with this bundle: "


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}
    dropout: float | None = None


class _Document(msgspec.Struct):
    """The parts of tokenizer.json that tell its tokens."""

    model: _Model = _Model()
    added_tokens: list[dict[str, Any]] = []


def folder_tokenizer(folder: Path, end_ids: object = None) -> dict[str, bytes]:
    """The tokenizer's files in a folder by name, with what transformers knows beside them.

    Args:
        folder: of a checkpoint.
        end_ids: the end token, or several, of its config.json. They count where there is no
            generation_config.json, as in transformers.

    Raises BundleError for a vocabulary in other files that transformers cannot read.
    """
    files = tokenizer_files(folder)
    if VOCABULARY in files:
        files |= _end_token(folder, files)
    elif others := [n for n in (*_PIECES, _WORDS, *_OTHERS) if (folder / n).is_file()]:
        files |= _built(folder, others)
    if files and GENERATION not in files and end_ids is not None:
        files[GENERATION] = json.dumps(
            {"_from_model_config": True, "eos_token_id": end_ids}
        ).encode()
    return files


def tokenizer_warnings(
    files: dict[str, bytes], embedded: int, settings: Mapping[str, Any] = {}
) -> list[str]:
    """What is odd about a tokenizer, in words.

    Args:
        files: of the tokenizer, by name.
        embedded: how many tokens the model embeds.
        settings: the model's, which may name tokens too.
    """
    if VOCABULARY not in files:
        return []
    try:
        special, vocabulary = special_of(files), _vocabulary(files)
        tokens = numbered(special, vocabulary, _added(files))
    except (ValueError, TypeError, AttributeError, KeyError) as problem:
        return [f"{UNREADABLE}{problem}"]
    warnings = []
    texts = {number: text for text, number in vocabulary.items()}
    if twice := [text for text, number in vocabulary.items() if texts[number] != text]:
        number = vocabulary[twice[0]]
        warnings.append(
            f"{twice[0]!r:.40} and {texts[number]!r:.40} in {VOCABULARY} have one number, {number}:"
            " text with either is read, but chance decides which of them an answer shows"
        )
    every = {**vocabulary, **{token.content: token.number for token in tokens}}
    if over := sorted((n, text) for text, n in every.items() if n is not None and n >= embedded):
        shown = ", ".join(f"{text!r:.40} ({number})" for number, text in over[:_SHOWN])
        more = ", ..." if len(over) > _SHOWN else ""
        warnings.append(
            f"the model embeds {embedded} tokens, and the tokenizer has {len(over)} more: {shown}"
            f"{more}; rows of data with one of these are left out. To train them, give the model "
            f"rows for them in transformers (resize_token_embeddings({over[-1][0] + 1})), save it "
            "and export that"
        )
    stated = {token.content: token.number for token in special.more if token.number is not None}
    if moved := [
        token for token in tokens if stated.get(token.content, token.number) != token.number
    ]:
        first = moved[0]
        warnings.append(
            f"its files give {len(moved)} tokens other numbers than they get, as in transformers: "
            f"{first.content!r:.40} is {first.number}, and not {stated[first.content]}"
        )
    named = {**settings, **from_json(files.get(GENERATION, b"{}"))}
    for key in _IDS:
        given = named.get(key)
        numbers = given if isinstance(given, list) else [given]
        if beyond := [n for n in numbers if isinstance(n, int) and not -1 <= n < embedded]:
            warnings.append(
                f"{key} is {', '.join(map(str, beyond))}, and the model embeds {embedded} tokens: "
                f"{_IDS[key]}; correct it in config.json and generation_config.json, and export "
                "again"
            )
    if "eos_token" not in special.named:
        warnings.append(
            "the tokenizer names no eos_token: rows of text and completions end without one, so "
            "the model does not learn to end there; name it in tokenizer_config.json, and export "
            "again"
        )
    return warnings + _unreadable_templates(files)


def _unreadable_templates(files: dict[str, bytes]) -> list[str]:
    """A warning of each chat template that is no program of Jinja as transformers reads it."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    warnings = []
    try:
        templates = templates_of(files)
        for name in [name for name in (DEFAULT, WITH_TOOLS) if name in templates]:
            if not isinstance(templates[name], str):
                raise TypeError(f"{name!r} is no text")
            try:
                environment.parse(templates[name])
            except TemplateSyntaxError as problem:
                reason = str(problem.message).rstrip(".")
                warnings.append(
                    f"line {problem.lineno} of the chat template {name!r} cannot be read, nor any "
                    f"conversation with this bundle: {reason}; correct it in the checkpoint, and "
                    "export again"
                )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        return [f"the chat template cannot be read, nor any conversation: {problem!r:.200}"]
    return warnings


class _Generation(Extension):
    """The tags with which templates for transformers mark answers."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _end_token(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """The configuration with the names that a tokenizer's class has, if no file names an end."""
    try:
        if "eos_token" in special_of(files).named or "eos_token" in from_json(
            files.get(CONFIG, b"{}")
        ):
            return {}
        numbers = {**_vocabulary(files), **{t.content: t.number for t in _added(files)}}
        theirs = _theirs(folder)
    except Exception:  # whatever is wrong with the files, `tokenizer_warnings` says it
        return {}
    named = {name: text for name, text in _names(theirs).items() if text in numbers}
    return _with_names(files, named) if "eos_token" in named else {}


def _built(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of a tokenizer in other files."""
    try:
        theirs = _theirs(folder)
        if lost := _lost(folder, theirs):
            raise ValueError(f"it would lack {lost[0]!r:.40} and {len(lost) - 1} others")
        content = theirs.backend_tokenizer.to_str().encode()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # each sort of file fails in its own way, some by a panic
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise BundleError(
            f"{folder} has {', '.join(names)} and no {VOCABULARY}, and transformers "
            f"{metadata.version('transformers')} cannot make one of it: {reason:.200}; load the "
            f"tokenizer where it works and write it there with save_pretrained, or copy the "
            f"{VOCABULARY} of the model into the folder"
        ) from None
    files = tokenizer_files(folder)
    return {VOCABULARY: content, **_with_names(files, _names(theirs))}


def _lost(folder: Path, theirs: Any) -> list[str]:
    """The tokens of the folder's vocabulary that a tokenizer has not, or under another number."""
    there: dict[str, int] = {}
    if (folder / _WORDS).is_file():
        there = from_json((folder / _WORDS).read_bytes())
    elif file := next((folder / name for name in _PIECES if (folder / name).is_file()), None):
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(model_file=str(file))
        there = {pieces.id_to_piece(number): number for number in range(len(pieces))}
    # placeholders of a vocabulary may have been renamed
    numbers, renamed = theirs.get_vocab(), theirs.added_tokens_decoder
    return [t for t, n in there.items() if numbers.get(t) != n and n not in renamed]


def _theirs(folder: Path) -> Any:
    """The tokenizer as transformers loads it, which runs no code of the checkpoint."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _names(theirs: Any) -> dict[str, str]:
    return {n: str(t) for n, t in theirs.special_tokens_map.items() if n in _NAMED}


def _with_names(files: dict[str, bytes], named: dict[str, str]) -> dict[str, bytes]:
    """The configuration with the tokens' names that it lacks."""
    config = from_json(files.get(CONFIG, b"{}"))
    config |= {name: text for name, text in named.items() if name not in config}
    return {CONFIG: json.dumps(config, ensure_ascii=False, indent=2).encode()}


def _vocabulary(files: dict[str, bytes]) -> dict[str, int]:
    """The numbers of the model's tokens in tokenizer.json."""
    model = msgspec.json.decode(files[VOCABULARY], type=_Document).model
    if model.dropout:
        raise ValueError(RANDOM.format(model.dropout))
    if isinstance(words := model.vocab, dict):
        return words
    return {str(entry[0]): number for number, entry in enumerate(words)}  # with their scores


def _added(files: dict[str, bytes]) -> list[MoreToken]:
    """The tokens of tokenizer.json that are found before text is split."""
    return added_in(msgspec.json.decode(files[VOCABULARY], type=_Document).added_tokens)
