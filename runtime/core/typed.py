"""JSON of a type: the value, or a ValueError that names the place, its key, and the value there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_file, reading_errors

T = TypeVar("T")
_PLACE = re.compile(r" - at `(?P<is_key>key` in `)?\$(?P<keys>[^`]*)`$")
_KEY = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def decoded(data: bytes, kind: type[T]) -> T:
    """The JSON in `data` as a type. Raises ValueError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as problem:
        as_type(from_json(data), kind)  # it names the value, too
        # it has none to name: a number out of range, or a key's first value of two
        raise ValueError(str(problem)) from None
    except RecursionError:
        raise ValueError("lists and objects are nested too deep") from None


def as_type(value: object, kind: type[T]) -> T:
    """A value of JSON as a type. Raises ValueError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise ValueError(_located(problem, value, kind)) from None


def read_typed(path: Path, kind: type[T]) -> T:
    """The content of a file of JSON.

    Raises:
        BundleError: it cannot be read, or holds something else.
    """
    with reading_errors(path):
        data = read_file(path)
    try:
        return decoded(data, kind)
    except ValueError as problem:
        raise BundleError(f"{path} is damaged: {problem}") from None


def _located(problem: msgspec.ValidationError, document: Any, kind: Any) -> str:
    """The message with the value, and with the keys for which msgspec writes `[...]`."""
    text = str(problem)
    place = _PLACE.search(text)
    keys: list[Any] = []
    for key in _KEY.finditer("" if place is None else place["keys"]):
        keys.append(key["field"] or (int(key["index"]) if key["index"] else None))
        if keys[-1] is None:
            keys[-1] = _wrong_key(text, document, keys[:-1], kind)
            # without the other entries, which may be wrong likewise
            document = _having(document, keys[:-1], {keys[-1]: _at(document, keys)})
    value = _at(document, keys)
    if place is not None:
        text = text[: place.start()]
        if place["is_key"]:
            value = _wrong_key(str(problem), document, keys, kind)
    shown = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return f"{text} - at `${shown}`, which is {value!r:.80}"


def _wrong_key(text: str, document: Any, keys: list[Any], kind: Any) -> Any:
    """The first key of the object at `keys` that has the same message when it is there alone."""
    for key, value in _at(document, keys).items():
        try:
            msgspec.convert(_having(document, keys, {key: value}), kind)
        except msgspec.ValidationError as problem:
            if str(problem) == text:
                return key
    raise AssertionError("none of its entries is wrong")


def _at(document: Any, keys: list[Any]) -> Any:
    for key in keys:
        document = document[key]
    return document


def _having(document: Any, keys: list[Any], part: Any) -> Any:
    """The document with another part at `keys`."""
    if not keys:
        return part
    copy = document.copy()
    copy[keys[0]] = _having(document[keys[0]], keys[1:], part)
    return copy
