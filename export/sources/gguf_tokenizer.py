"""Converts the vocabulary in a GGUF file's metadata to Hugging Face tokenizer files.

There are three sorts: SentencePiece ("llama"), whose merges follow from scores of its tokens,
byte-level BPE ("gpt2"), whose merges are stored, and Gemma 4's, SentencePiece with merges.
Invariant: a token has the same id in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from runtime.core.errors import BundleError
from runtime.data.tokenizer_files import CONFIG, GENERATION, VOCABULARY

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
NO_VOCABULARY = "no_vocab"  # tokenizer.ggml.model of files without one
GEMMA = "gemma4"
SPACE = "▁"
# special tokens as Hugging Face names them -> as GGUF files do, one of them misspelled
NAMED = {
    **{"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"},
    **{"sep": "seperator", "mask": "mask"},
}


@dataclass(frozen=True)
class Split:
    """How a byte-level tokenizer splits text before merging; without a regex, by GPT-2's."""

    regex: str | None = None
    digits: bool = False  # split off each digit first
    nfc: bool = False
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, without merging
    add_bos: bool = False  # the default of tokenizer.ggml.add_bos_token


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> split
SPLITS = {
    "qwen2": Split(_WORDS + r"\p{N}" + _REST, nfc=True),
    "qwen35": Split(_MARKED + _REST.replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"), nfc=True),
    "llama-bpe": Split(_WORDS + r"\p{N}{1,3}" + _REST, ignore_merges=True, add_bos=True),
    "smaug-bpe": Split(_WORDS + r"\p{N}{1,3}" + _REST),
    "smollm": Split(digits=True),
    "gpt-2": Split(),
    "default": Split(),
}
# names by which llama.cpp splits as by another
_ALIASES = {
    "qwen2": "deepseek-r1-qwen kormo megrez hunyuan stablelm2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "smaug-bpe": "dbrx",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "gpt-2": """
        phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum
        jina-es jina-de jina-v2-es jina-v2-de
    """,
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


def convert_tokenizer(metadata: dict[str, Any], where: str) -> dict[str, bytes]:
    """Contents of tokenizer.json and tokenizer_config.json, by name; {} without a vocabulary.

    Args:
        metadata: of the GGUF file, by key.
        where: the model's name, for messages.

    Raises BundleError for a vocabulary of another sort, or an inconsistent one.
    """
    try:
        return _convert(metadata, where)
    except BundleError:
        raise
    except Exception as e:  # tokenizers raises nothing more precise for a vocabulary it refuses
        raise BundleError(f"{where}: the vocabulary cannot be converted: {e}") from e


def _convert(metadata: dict[str, Any], where: str) -> dict[str, bytes]:
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, NO_VOCABULARY):
        return {}
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))]
    if not tokens or len(types) != len(tokens):
        raise BundleError(
            f"{where}: tokenizer.ggml.model = {model!r:.40} needs tokenizer.ggml.tokens, and as "
            f"many of token_type; there are {len(tokens)} and {len(types)}"
        )
    if model in ("llama", GEMMA):
        tokenizer, default_bos = _sentencepiece(metadata, tokens, types, where), True
    elif model == "gpt2":
        split = _split(metadata, where)
        vocabulary = _vocabulary(tokens)
        merges = _merges(metadata, vocabulary, where)
        tokenizer, default_bos = _byte_level(vocabulary, merges, split), split.add_bos
    else:
        raise BundleError(
            f"{where}: tokenizer.ggml.model = {model!r:.40} is not supported; "
            f"supported are llama (SentencePiece), {GEMMA} and gpt2 (byte-level BPE)"
        )
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=special[type_])
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in special
        ]
    )
    named = {f"{name}_token": _token(metadata, key, tokens, where) for name, key in NAMED.items()}
    adds = {
        "bos": bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)),
        "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    _add_bos_and_eos(tokenizer, named, adds, tokens)
    config = _tokenizer_config(named, adds, _templates(metadata))
    files = {
        VOCABULARY: tokenizer.to_str().encode(),
        CONFIG: json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
    # there are up to three, of a text, a turn and a message
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if any(end is not None for end in ends):  # transformers ends answers by them alone
        ids = sorted({int(end) for end in ends if end is not None})
        files[GENERATION] = json.dumps({"eos_token_id": ids}).encode()
    return files


def _split(metadata: dict[str, Any], where: str) -> Split:
    """The split of a byte-level tokenizer, by its name in the file."""
    stated = metadata.get("tokenizer.ggml.pre") or "default"
    name = _NAMES.get(stated, stated)
    if name not in SPLITS:
        raise BundleError(
            f"{where}: tokenizer.ggml.pre = {stated!r:.40} splits text in a way that is not known "
            "here; export from the model's Hugging Face folder, whose tokenizer.json says how, or "
            f"from a file that splits as one of {', '.join((*SPLITS, *sorted(_NAMES)))}"
        )
    return SPLITS[name]


def _templates(metadata: dict[str, Any]) -> Any:
    """The chat template, or a list of them by name where there are several."""
    default, prefix = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    keys = [key for key in metadata if key.startswith(prefix)]
    named = [{"name": key.removeprefix(prefix), "template": metadata[key]} for key in keys]
    if default is None or not named:
        return named or default
    return [{"name": "default", "template": default}, *named]


def _tokenizer_config(
    named: dict[str, str | None], adds: dict[str, bool], template: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds["bos"] and named["bos_token"] is not None,
        "add_eos_token": adds["eos"] and named["eos_token"] is not None,
        **{key: token for key, token in named.items() if token is not None},
    }
    if template is not None:
        config["chat_template"] = template
    return config


def _token(metadata: dict[str, Any], key: str, tokens: Sequence[str], where: str) -> str | None:
    index: int | None = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise BundleError(
            f"{where}: tokenizer.ggml.{key}_token_id is {index}, but there are only {len(tokens)} "
            "tokens"
        )
    return tokens[index]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; if two tokens have the same text, the id of the first."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _sentencepiece(
    metadata: dict[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    """BPE with byte fallback. Spaces become "▁"; with add_space_prefix the text gets another."""
    vocabulary = _vocabulary(tokens)
    if metadata["tokenizer.ggml.model"] == GEMMA:
        merges = _merges(metadata, vocabulary, where)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise BundleError(f"{where}: tokenizer.ggml.scores must have a score for each token")
        merges = derive_merges(
            [t for t, type_ in zip(tokens, types, strict=True) if type_ == NORMAL],
            [float(s) for s, type_ in zip(scores, types, strict=True) if type_ == NORMAL],
        )
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=_token(metadata, "unknown", tokens, where),
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def derive_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that make BPE split text as SentencePiece does, in order of rank.

    SentencePiece joins the two neighbours whose union scores highest. So the merges are all ways to
    make a piece of two others: of the piece that scores highest first, and for one piece in the
    order of their ids.
    """
    rank = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(pieces)), key=lambda i: -scores[i]):
        piece = pieces[index]
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in rank and right in rank]
        merges += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def _merges(
    metadata: dict[str, Any], vocabulary: dict[str, int], where: str
) -> list[tuple[str, str]]:
    stored: Sequence[str] | None = metadata.get("tokenizer.ggml.merges")
    if stored is None:
        kind = metadata["tokenizer.ggml.model"]
        raise BundleError(f"{where}: a {kind} vocabulary needs tokenizer.ggml.merges")
    merges: list[tuple[str, str]] = []
    for line in stored:
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise BundleError(f"{where}: the merge {line!r} has parts that are no tokens")
        merges.append((left, right))
    return merges


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], split: Split
) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges)
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_bos_and_eos(
    tokenizer: Tokenizer, named: dict[str, str | None], adds: dict[str, bool], tokens: Sequence[str]
) -> None:
    """Make the tokenizer put these tokens before and after each text."""
    ends = {end: named[f"{end}_token"] for end in ("bos", "eos")}
    used = {end: token for end, token in ends.items() if adds[end] and token is not None}
    if used:
        first, last = used.get("bos"), used.get("eos")
        template = [part for part in (first, "$A", last) if part is not None]
        second = ["$B:1" if part == "$A" else f"{part}:1" for part in template]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(template),
            pair=" ".join([*template, *second]),
            special_tokens=[(token, tokens.index(token)) for token in set(used.values())],
        )
