"""JSON and TOML from elsewhere as values, and the JSON header of safetensors files.

Whatever is wrong with a document that is read is a ValueError.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from functools import partial
from typing import Any

_VISIBLE = re.compile(r"[^ \t\n\r]")  # anything but JSON's spaces
MOST_DEPTH = 100  # of lists and objects inside each other: code that walks them may be recursive
_TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"


class RepeatedKeyError(ValueError):
    """An object has a key twice."""


def from_json(text: str | bytes) -> Any:
    """The value of a JSON document. Raises ValueError."""
    return _parsed(json.loads, text)


def from_json_once(text: str | bytes) -> Any:
    """As `from_json`, but raises RepeatedKeyError for an object that has a key twice."""
    return _parsed(partial(json.loads, object_pairs_hook=_once), text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"it has the key {twice!r} twice")
    return fields


def from_json_values(text: str) -> list[Any]:
    """The values of JSON documents that follow one another, as `from_json_once` reads each."""
    values: list[Any] = _parsed(_values, text)
    return values


def _values(text: str) -> list[Any]:
    values, decoder = [], json.JSONDecoder(object_pairs_hook=_once)
    start = _after_space(text, 0)
    while start < len(text):
        value, end = decoder.raw_decode(text, start)
        values.append(value)
        start = _after_space(text, end)
    return values


def _after_space(text: str, start: int) -> int:
    visible = _VISIBLE.search(text, start)
    return len(text) if visible is None else visible.start()


def from_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML document, in UTF-8. Raises ValueError."""
    tables: dict[str, Any] = _parsed(tomllib.loads, data.decode())
    return tables


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _parsed(parse: Any, text: str | bytes) -> Any:
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as problem:
        if "integer string conversion" in str(problem):
            raise ValueError("it has a whole number of more than 4,300 digits") from None
        raise
    if is_deeper(value, MOST_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


SAFETENSORS_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes that stand before the tensors' own, which follow in this order without gaps.

    Args:
        tensors: the type, F32, F16 or BF16, and the shape of each, by name.
        metadata: texts for readers; "format" names the library that wrote them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * SAFETENSORS_ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
