"""A tokenizer's files as the vocabulary of a GGUF file: the inverse of `sources.gguf_tokenizer`.

Byte-level BPE has merges. SentencePiece has scores in place of merges: a piece scores higher
the earlier its merges come. Invariant: a token has the same id in both.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
from gguf import GGUFWriter

from export.sources.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GEMMA,
    NO_VOCABULARY,
    NORMAL,
    SPACE,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Split,
)
from runtime.core.errors import UsageError
from runtime.data.tokenizer_files import (
    DEFAULT,
    MoreToken,
    added_in,
    numbered,
    special_of,
    templates_of,
)

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NAMED = ("bos", "eos", "unk", "pad", "sep", "mask")
_UNRANKED = -1000.0  # the score of a token that merges never make


class _Model(msgspec.Struct):
    """The part "model" of tokenizer.json."""

    vocab: dict[str, int]
    merges: list[tuple[str, str] | str]
    type: str = "BPE"
    byte_fallback: bool = False
    ignore_merges: bool = False


class _Tokenizer(msgspec.Struct):
    """The parts of tokenizer.json that are read."""

    model: _Model
    added_tokens: list[dict[str, Any]] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a GGUF file about a tokenizer.

    `scores` are those of SentencePiece (model "llama"), `merges` those of byte-level BPE ("gpt2")
    and of Gemma 4 ("gemma4").
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    adds: dict[str, bool]
    special: dict[str, int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    space_prefix: bool = False
    chat_template: str | list[dict[str, str]] | None = field(default=None, repr=False)

    def add_to(self, writer: GGUFWriter) -> None:
        """Give it to a writer."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.model != "gpt2":
            writer.add_add_space_prefix(self.space_prefix)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for name, index in self.special.items():
            getattr(writer, f"add_{name}_token_id")(index)
        writer.add_add_bos_token(self.adds["bos"])
        writer.add_add_eos_token(self.adds["eos"])
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def add_vocabulary(writer: GGUFWriter, files: dict[str, bytes], size: int) -> None:
    """Give a writer the vocabulary of a tokenizer's files, padded to `size` tokens.

    Without files the GGUF file says that it has none.

    Raises:
        UsageError: GGUF files cannot hold such a tokenizer; the message names the part.
    """
    if not files:
        writer.add_tokenizer_model(NO_VOCABULARY)
        return
    read_vocabulary(files, size, writer.arch).add_to(writer)


def read_vocabulary(files: dict[str, bytes], size: int, arch: str = "") -> Vocabulary:
    """The vocabulary in a tokenizer's files by name, for an architecture. Raises as above."""
    try:
        return _read(files, size, arch)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:  # parts of other forms
        raise _refusal(f"its files are of another form: {problem!r:.80}") from None


def _read(files: dict[str, bytes], size: int, arch: str) -> Vocabulary:
    if "tokenizer.json" not in files:
        raise _refusal(f"there is no tokenizer.json, but {', '.join(sorted(files))}")
    try:
        tokenizer = msgspec.json.decode(files["tokenizer.json"], type=_Tokenizer)
    except msgspec.DecodeError as problem:
        raise _refusal(f"its files are of another form: {problem}") from None
    if tokenizer.model.type != "BPE":
        raise _refusal(f"its model is {tokenizer.model.type!r:.40}; BPE is supported")
    said = special_of(files)
    added = numbered(said, tokenizer.model.vocab, added_in(tokenizer.added_tokens))
    ids = {**tokenizer.model.vocab, **{t.content: t.number for t in added if t.number is not None}}
    named = {name: said.named.get(f"{name}_token") for name in _NAMED}
    special = {name: ids[text] for name, text in named.items() if text in ids}
    tokens, types = _tokens(tokenizer, added, special.get("unk"), size)
    special |= _other_ends(said.ends - {special.get("eos")}, tokens)
    shared: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "adds": _adds(tokenizer.post_processor, special, ids),
        "special": special,
        "chat_template": _templates(files),
    }
    merges = [
        merge if isinstance(merge, tuple) else _pair(merge) for merge in tokenizer.model.merges
    ]
    texts = [f"{left} {right}" for left, right in merges]
    if any(part.get("type") == "ByteLevel" for part in _parts(tokenizer.pre_tokenizer)):
        return Vocabulary("gpt2", _pre(tokenizer), **shared, merges=texts)
    prefix = _space_prefix(tokenizer)
    if arch == GEMMA and not prefix and shared["adds"]["bos"]:  # as llama.cpp has them in any case
        return Vocabulary(GEMMA, GEMMA, **shared, merges=texts)
    scores = _scores(tokens, types, merges)
    return Vocabulary("llama", "default", **shared, scores=scores, space_prefix=prefix)


def _refusal(why: str) -> UsageError:
    return UsageError(f"--format gguf: the tokenizer cannot be written: {why}; use --format hf")


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _templates(files: dict[str, bytes]) -> str | list[dict[str, str]] | None:
    """The chat template, or several by name, as GGUFWriter takes them."""
    templates = templates_of(files)
    if templates.keys() <= {DEFAULT}:
        return templates.get(DEFAULT)
    return [{"name": name, "template": text} for name, text in templates.items()]


def _other_ends(ends: Set[int], tokens: list[str]) -> dict[str, int]:
    """The tokens beside EOS that end generation: llama.cpp has two names for such."""
    inside = sorted(number for number in ends if 0 <= number < len(tokens))
    message = next((number for number in inside if "eom" in tokens[number]), None)
    turn = next((number for number in inside if number != message), None)
    numbers = {"eot": turn, "eom": message}
    return {name: number for name, number in numbers.items() if number is not None}


def _tokens(
    tokenizer: _Tokenizer, added: list[MoreToken], unknown: int | None, size: int
) -> tuple[list[str], list[int]]:
    """Tokens by id and their types; the model's other rows are unused tokens."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [UNUSED] * size

    def put(text: str, index: int, kind: int) -> None:
        if not 0 <= index < size:
            raise _refusal(f"token {text!r:.40} is number {index}, and the model has {size}")
        tokens[index], types[index] = text, kind

    fallback = tokenizer.model.byte_fallback
    for text, index in tokenizer.model.vocab.items():
        put(text, index, BYTE if fallback and text in _BYTES else NORMAL)
    for token in added:
        assert token.number is not None
        put(token.content, token.number, CONTROL if token.special else USER_DEFINED)
    if unknown is not None:
        types[unknown] = UNKNOWN
    return tokens, types


def _adds(
    processor: dict[str, Any] | None, special: dict[str, int], ids: dict[str, int]
) -> dict[str, bool]:
    """Whether each text gets the tokens of its beginning and end."""
    adds = {"bos": False, "eos": False}
    for part in _parts(processor):
        kind = part.get("type")
        if kind == "TemplateProcessing":
            template = part["single"]
            texts = ["Sequence" in piece for piece in template]
            before, after = template[: texts.index(True)], template[texts.index(True) + 1 :]
            for end, pieces in (("bos", before), ("eos", after)):
                tokens = [ids.get(piece["SpecialToken"]["id"]) for piece in pieces]
                if tokens not in ([], [special.get(end)]):
                    raise _refusal(f"it adds tokens to texts that are no {end} token")
                adds[end] = bool(tokens)
        elif kind != "ByteLevel":
            raise _refusal(f"its post-processor {kind!r:.40} is not supported")
    return adds


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, one after another."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    names = ("normalizers", "pretokenizers", "processors")
    inner: list[dict[str, Any]] = next((step[name] for name in names if name in step), [])
    return [part for inner_step in inner for part in _parts(inner_step)]


def _pre(tokenizer: _Tokenizer) -> str:
    """llama.cpp's name of how a byte-level tokenizer splits text."""
    normalizers = [part.get("type") for part in _parts(tokenizer.normalizer)]
    regex, digits, own_regex = None, False, True
    for part in _parts(tokenizer.pre_tokenizer):
        kind = part.get("type")
        if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            regex = part["pattern"].get("Regex")
        elif kind == "Digits" and part.get("individual_digits"):
            digits = True
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            own_regex = part.get("use_regex", True)
        else:
            raise _refusal(f"its pre-tokenizer {kind!r:.40} is none that llama.cpp has a name for")
    if normalizers not in ([], ["NFC"]) or own_regex != (regex is None):
        raise _refusal(f"its normalizer {normalizers} is none that llama.cpp has a name for")
    split = Split(regex, digits, bool(normalizers), tokenizer.model.ignore_merges)
    for name, known in SPLITS.items():
        if split == Split(known.regex, known.digits, known.nfc, known.ignore_merges):
            return name
    raise _refusal(f"it splits text by {regex!r:.60}, for which llama.cpp has no name")


def _space_prefix(tokenizer: _Tokenizer) -> bool:
    """Whether a SentencePiece tokenizer puts a space before the text."""
    prefix, replaces = False, False
    for part in _parts(tokenizer.normalizer):
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE:
            prefix = True
        elif part.get("type") == "Replace" and part.get("pattern") == {"String": " "}:
            replaces = part.get("content") == SPACE
        else:
            raise _refusal(f"its normalizer {part.get('type')!r:.40} is not supported")
    for part in _parts(tokenizer.pre_tokenizer):
        if part.get("type") == "Metaspace" and part.get("replacement") == SPACE:
            replaces, prefix = True, part.get("prepend_scheme") != "never"
        elif part.get("type") != "Split" or part.get("pattern") != {"String": " "}:
            raise _refusal(f"its pre-tokenizer {part.get('type')!r:.40} is not supported")
    if not (replaces and tokenizer.model.byte_fallback):
        raise _refusal("it is neither byte-level BPE nor SentencePiece with bytes for unknown text")
    return prefix


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, str]]) -> list[float]:
    """The scores (V,) by which SentencePiece joins the pieces that these merges join, in order.

    Raises:
        UsageError: no scores do, because SentencePiece would join others, or in another order.
    """
    normal = {text: index for index, text in enumerate(tokens) if types[index] == NORMAL}
    scores = [0.0 if kind == BYTE else _UNRANKED for kind in types]
    ways: dict[int, int] = {}  # of making a piece
    last = -1
    for left, right in merges:
        piece = normal.get(left + right)
        if piece is None or left not in normal or right not in normal:
            continue  # of an added token, which is looked for before pieces are joined
        if piece != last and piece in ways:
            raise _refusal(f"its merges to {tokens[piece]!r:.40} do not follow each other")
        if piece != last:
            scores[piece] = -float(len(ways))
        ways[piece] = ways.get(piece, 0) + 1
        last = piece
    for text, index in normal.items():
        possible = sum(text[:cut] in normal and text[cut:] in normal for cut in range(1, len(text)))
        if possible != ways.get(index, 0):
            raise _refusal(
                f"{text!r:.40} can be joined in {possible} ways, of which its merges have "
                f"{ways.get(index, 0)}"
            )
        if not possible:
            scores[index] = -float(len(normal))
    return scores
