"""JSON and TOML from elsewhere as values; whatever is wrong with a document is a ValueError."""

from __future__ import annotations

import json
import tomllib
from typing import Any

MOST_DEPTH = 100  # of lists and objects inside each other: code that walks them may be recursive
_TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"


def from_json(text: str | bytes) -> Any:
    """The value of a JSON document. Raises ValueError."""
    return _parsed(json.loads, text)


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
    if is_deeper(value, MOST_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value
