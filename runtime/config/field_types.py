"""The types that fields of configurations can have: how they are checked, shown and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from typing import Any, NamedTuple


class FieldType(NamedTuple):
    """A type that fields can have."""

    words: str
    metavar: str
    fits: Callable[[Any], bool]
    from_text: Callable[[str], Any] = str


def too_long(value: Any) -> bool:
    """Whether a whole number has more than the 64 bits of TOML's."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def whole(value: Any) -> bool:
    """Whether it is a whole number, as TOML can hold it."""
    return isinstance(value, int) and not isinstance(value, bool) and not too_long(value)


def _number(value: Any) -> bool:
    return whole(value) or isinstance(value, float)


# by annotation without None; `from __future__ import annotations` keeps annotations as text
_TYPES = {
    "str": FieldType("text", "TEXT", lambda value: isinstance(value, str)),
    "int": FieldType("a whole number", "N", whole, int),
    "float": FieldType("a number", "X", _number, float),
    "bool": FieldType("true or false", "", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": FieldType(
        "a list of names",
        "TEXT,TEXT,...",
        lambda value: (
            isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        ),
        lambda text: tuple(text.split(",")),
    ),
    "tuple[int, ...]": FieldType(
        "a list of whole numbers",
        "N,N,...",
        lambda value: isinstance(value, list | tuple) and all(map(whole, value)),
        lambda text: tuple(map(int, text.split(","))),
    ),
}


def type_of(setting: Field[Any]) -> FieldType:
    """The type of a configuration's field."""
    name = str(setting.type)
    kind = _TYPES[name.removesuffix(" | None")]
    if not name.endswith(" | None"):
        return kind
    return kind._replace(fits=lambda value: value is None or kind.fits(value))
