"""JSON to frozen dataclasses and back, strictly: a missing, unknown or ill-typed key is named."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from ondevice.errors import BundleError

D = TypeVar("D")
MAX_INT = 2**63 - 1
MAX_DEPTH = 20


def encode(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists; fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: encode(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != _default(f)
        }
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def decode(cls: type[D], data: Any, where: str) -> D:
    """Build `cls` from JSON data.

    Raises:
        BundleError: naming `where` in the document the data does not fit.
    """
    if not isinstance(data, dict):
        raise BundleError(f"{where}: expected an object, found {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise BundleError(f"{where}: unknown keys {unknown}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}")
        elif _default(field) is dataclasses.MISSING:
            raise BundleError(f"{where}: {name!r} is missing")
    return cls(**values)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        _check_depth(data, where, MAX_DEPTH)
        return data
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise BundleError(f"{where}: {data!r} is none of {list(arguments)}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise BundleError(f"{where}: expected a list")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise BundleError(f"{where}: expected an object")
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return decode(hint, data, where)  # type: ignore[arg-type]
    if isinstance(data, int) and abs(data) > MAX_INT:
        raise BundleError(f"{where}: a number of {data.bit_length()} bits")
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise BundleError(f"{where}: expected {hint.__name__}, found {data!r:.60}")
    if hint is int and data < 0:
        raise BundleError(f"{where}: {data} is negative")
    return data


def _check_depth(data: Any, where: str, left: int) -> None:
    if left == 0:
        raise BundleError(f"{where}: nested too deeply")
    if isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            _check_depth(item, where, left - 1)


def _union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is not type(None):
            try:
                return _value(option, data, where)
            except BundleError as problem:
                problems.append(problem)
    raise problems[0]
