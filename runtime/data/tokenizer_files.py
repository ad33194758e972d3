"""A tokenizer's files, read as transformers reads them: special tokens, further tokens, templates.

Beside tokenizer.json there are up to six small files and a folder of templates, whose contents
overlap. Where two disagree, the one that transformers takes is taken here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.core.documents import from_json

VOCABULARY, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
SPECIAL_MAP, MORE_TOKENS = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, OLDER_TEMPLATE = "chat_template.jinja", "chat_template.json"
TEMPLATES, TEMPLATE_SUFFIX = "additional_chat_templates", ".jinja"
DEFAULT, WITH_TOOLS = "default", "tool_use"  # as checkpoints with several templates name them
SMALL_FILES = (CONFIG, SPECIAL_MAP, MORE_TOKENS, TEMPLATE, OLDER_TEMPLATE, GENERATION)
RANDOM = f"model.dropout = {{}} in {VOCABULARY} draws other tokens each time; set it to null"
STANDARD = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_SUFFIX = "_token"
_SWITCHES = ("add_bos_token", "add_eos_token")  # which end so, and are no tokens
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class MoreToken:
    """A token that is found before text is split, as a file beside tokenizer.json has it.

    number: in the vocabulary, if a file says so.  flags: those of tokenizers' AddedToken.
    restated: whether its flags also hold where tokenizer.json has the token with others.
    """

    content: str
    special: bool
    flags: Mapping[str, bool]
    number: int | None = None
    restated: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """All but the number."""
        return (self.content, self.special, *(self.flags[name] for name in FLAGS))


@dataclass(frozen=True)
class Special:
    """What the small files say of tokens.

    named: the text of each token that has a name, such as `eos_token`.  more: the tokens that the
    tokenizer gets if it lacks them, in this order.  ends: the numbers of those that end generation.
    adds_bos: whether each text begins with BOS; None if no file says so.
    """

    named: dict[str, str]
    more: list[MoreToken]
    ends: frozenset[int]
    adds_bos: bool | None


def tokenizer_files(folder: Path, vocabulary: bool = True) -> dict[str, bytes]:
    """The files of a tokenizer that are in a folder, by name; without tokenizer.json on wish."""
    names = (*((VOCABULARY,) if vocabulary else ()), *SMALL_FILES)
    paths = [folder / name for name in names]
    paths += sorted((folder / TEMPLATES).glob(f"*{TEMPLATE_SUFFIX}"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def special_of(files: Mapping[str, bytes]) -> Special:
    """What the files say of tokens. Raises ValueError or TypeError for files of another form."""
    config = _object(files, CONFIG)
    if config.get("split_special_tokens"):
        raise ValueError(
            "split_special_tokens is on, and special tokens in text are read as such here; delete "
            f"it in {CONFIG} if the model was trained without it"
        )
    decoder = _as(dict, config, "added_tokens_decoder", None)
    given = (_as((list, dict), config, key, []) for key in _EXTRA if config.get(key))
    extra: Any = next(given, [])
    if decoder is None:
        older = _object(files, SPECIAL_MAP)
        theirs = older.pop("extra_special_tokens", None) or []
        if isinstance(theirs, dict):
            older |= theirs
        elif isinstance(extra, list):
            extra = [*extra, *theirs]
        extra = extra or older.pop("additional_special_tokens", None) or []
        config = {**config, **older}
    further = dict(extra) if isinstance(extra, dict) else {}
    further |= _as(dict, config, "model_specific_special_tokens", {})
    values = {name: config.get(name) for name in STANDARD}
    values |= {name: value for name, value in config.items() if name.endswith(_SUFFIX)} | further
    values = {name: value for name, value in values.items() if name not in _SWITCHES}
    named = {name: text for name, value in values.items() if (text := _text(value)) is not None}
    if wrong := [name for name in STANDARD if values[name] is not None and name not in named]:
        raise TypeError(f"{wrong[0]} is {values[wrong[0]]!r:.80}, and no token")
    extras = [] if isinstance(extra, dict) else [_token(each, True, at=_EXTRA[0]) for each in extra]
    if decoder is None:
        known = {*named.values(), *(token.content for token in extras)}
        listed = [
            _token(text, text in known, _number(number, f"{text!r:.40} in {MORE_TOKENS}"))
            for text, number in _object(files, MORE_TOKENS).items()
        ]
    else:
        places = {number: f"added_tokens_decoder.{number}" for number in decoder}
        listed = [
            replace(_token(value, False, _decimal(number), places[number]), restated=True)
            for number, value in decoder.items()
        ]
    wanted = [_token(values[name], True, at=name) for name in named]
    more = [*sorted(listed, key=lambda token: token.number or 0), *wanted, *extras]
    return Special(named, more, _ends(files), _as(bool, config, "add_bos_token", None))


def templates_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The chat templates by name. Raises ValueError, KeyError or TypeError for other forms."""
    own: dict[str, Any] = {}
    if TEMPLATE in files:
        own[DEFAULT] = files[TEMPLATE].decode()
    for name, content in files.items():
        if name.startswith(f"{TEMPLATES}/"):
            own[name.removeprefix(f"{TEMPLATES}/").removesuffix(TEMPLATE_SUFFIX)] = content.decode()
    if own:
        return own
    template = _object(files, CONFIG).get("chat_template")
    if template is None:
        template = _object(files, OLDER_TEMPLATE).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    named = template if isinstance(template, dict) else {DEFAULT: template}
    return {name: text for name, text in named.items() if text is not None}


def numbered(
    special: Special, vocabulary: Mapping[str, int], added: Iterable[MoreToken]
) -> list[MoreToken]:
    """All tokens that are found before text is split, with the numbers that they get.

    A token that the vocabulary lacks gets the next number, whatever the file says.

    Args:
        special: what the small files say.
        vocabulary: the model's in tokenizer.json, numbers by token.
        added: the tokens of tokenizer.json that are found before text is split.
    """
    tokens = {token.content: token for token in added}
    for token in missing(special, tokens.values()):
        before = tokens.get(token.content)
        number = before.number if before is not None else vocabulary.get(token.content)
        if number is None:
            last = max((t.number for t in tokens.values() if t.number is not None), default=-1)
            number = max(len(vocabulary), last + 1)
        tokens[token.content] = replace(token, number=number)
    return list(tokens.values())


def added_in(entries: Iterable[Mapping[str, Any]]) -> list[MoreToken]:
    """The list "added_tokens" of tokenizer.json."""
    at = f"added_tokens of {VOCABULARY}"
    return [_token(entry, False, _number(entry["id"], at), at) for entry in entries]


def missing(special: Special, added: Iterable[MoreToken]) -> list[MoreToken]:
    """The tokens of the small files that a tokenizer with these lacks, or has otherwise.

    Only a list with flags changes a token that is there; a mere name does not.
    """
    tokens = list(added)
    there = {token.content for token in tokens}
    same = {token.form for token in tokens}
    names = set(special.named.values())
    lacking: list[MoreToken] = []
    for token in special.more:
        if token.content in there and not (token.restated and token.form not in same):
            continue
        there.add(token.content)
        is_special = token.special or token.content in names
        lacking.append(replace(token, special=is_special))
    return lacking


def _token(value: Any, special: bool, number: int | None = None, at: str = "") -> MoreToken:
    """A token `at` a place in a file: a text, or an object with its text and flags."""
    content = _text(value)
    if content is None:
        raise TypeError(f"{at} is {value!r:.80}, and no token")
    fields = {} if isinstance(value, str) else value
    stated = {name: fields[name] for name in (*FLAGS, "special") if name in fields}
    if wrong := [name for name, flag in stated.items() if not isinstance(flag, bool)]:
        raise TypeError(f"{at}.{wrong[0]} must be true or false, is {stated[wrong[0]]!r:.80}")
    # a name in tokenizer_config.json stands for a special token, also where its object says not
    special = special or stated.get("special", False)
    flags = {"normalized": not special, **stated}
    return MoreToken(content, special, {name: flags.get(name, False) for name in FLAGS}, number)


def _number(value: Any, at: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{at}: {value!r:.80} is no number of a token")
    return value


def _decimal(number: str) -> int:
    if not number.isdecimal():
        raise ValueError(f"added_tokens_decoder has {number!r:.80}, which is no number of a token")
    return int(number)


def _as(kind: Any, config: Mapping[str, Any], key: str, absent: Any) -> Any:
    """A setting of a type, or what stands for null. Raises TypeError for another type."""
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        words = {dict: "an object", list: "a list", bool: "true or false"}
        wanted = " or ".join(words[each] for each in kinds)
        raise TypeError(f"{key} must be {wanted}, is {value!r:.80}")
    return absent if value is None else value


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _ends(files: Mapping[str, bytes]) -> frozenset[int]:
    """The end tokens of generation_config.json, if there is one: an id, several, or none."""
    ids = _object(files, GENERATION).get("eos_token_id", [])
    listed = ids if isinstance(ids, list) else [ids]
    at = f"eos_token_id of {GENERATION}"
    return frozenset(_number(number, at) for number in listed if number is not None)


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = from_json(files[name]) if name in files else {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value
