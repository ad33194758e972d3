"""Which settings of a configuration no model class can compute with: with others, it can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from runtime.core.errors import BundleError

# the errors that classes raise for values that they do not expect
MISREAD = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
    *(TypeError, ValueError),
)
_LACKS = re.compile(r"\S+ missing \d+ required positional arguments?: ")
_SHOWN = 3
_MOST_SETTINGS = 100  # of an object whose settings are tried one by one
_READ, _REFUSED = "read", "refused"

_Path = tuple[str, ...]
_Read = Callable[[dict[str, Any]], object]


class RefusedError(ValueError):
    """transformers' class refuses a configuration, and says why."""


class MisreadError(BundleError):
    """A model class, or the code before it, came upon a value that it does not expect."""


def misread(problem: Exception, where: str, said: str) -> BundleError:
    """The error to raise for one of a class: a MisreadError, or as transformers says it."""
    why = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
    why = f"it asks for {why}" if isinstance(problem, KeyError) else _LACKS.sub("it needs ", why)
    kind = BundleError if isinstance(problem, RefusedError) else MisreadError
    return kind(f"{where}: {said}: {why}")


def blamed(
    config: dict[str, Any],
    read: _Read,
    problem: MisreadError,
    where: str,
) -> BundleError:
    """The error to raise for the configuration at `where`, for which `read` has raised `problem`.

    It names the settings that keep it from being read; where no single one does, it is the problem.
    """
    culprits = _culprits(config, read)
    if not culprits:
        return problem
    said = [f"{'.'.join(path)} = {_at(config, path)!r:.60}" for path in culprits[:_SHOWN]]
    return BundleError(
        f"{where}: the configuration cannot be understood with {' or '.join(said)}; "
        "correct it as in the original model, or delete it if that computes without it"
    )


def _culprits(config: dict[str, Any], read: _Read) -> list[_Path]:
    """The paths of the settings that keep a configuration from being read.

    Within an object that does so, and of which each setting is needed, those without which it is
    refused for a reason of its own.
    """
    outcomes = {path: _outcomes(config, path, read) for path in _paths(config)}
    able = [path for path, outcome in outcomes.items() if _READ in outcome]
    groups = {path for path in outcomes if isinstance(_at(config, path), dict)}
    refused = [path for path, outcome in outcomes.items() if _REFUSED in outcome]
    inner = [
        path
        for path in refused
        if path not in groups and any(path[: len(group)] == group for group in groups & {*able})
    ]
    return [path for path in able if path not in groups] or inner or able


def _paths(config: dict[str, Any], outer: _Path = ()) -> Iterator[_Path]:
    """The paths of all settings but the type, and of the objects that hold some.

    Of the settings of each matrix, or of many labels, no single one is at fault.
    """
    for key, value in config.items():
        if key != "model_type":
            yield (*outer, key)
            if isinstance(value, dict) and len(value) <= _MOST_SETTINGS:
                yield from _paths(value, (*outer, key))


def _outcomes(config: dict[str, Any], path: _Path, read: _Read) -> set[str]:
    """How a configuration is read without a setting, and with a number in its place."""
    outcomes = set[str]()
    for changed in (_with(config, path), _with(config, path, 1)):
        try:
            read(changed)
            outcomes.add(_READ)
        except BundleError as problem:
            if not isinstance(problem, MisreadError):
                outcomes.add(_REFUSED)
    return outcomes


def _at(config: dict[str, Any], path: _Path) -> Any:
    value: Any = config
    for key in path:
        value = value[key]
    return value


def _with(config: dict[str, Any], path: _Path, *values: object) -> dict[str, Any]:
    """A configuration with another value at a path, or without any there."""
    key, *rest = path
    left = {name: value for name, value in config.items() if name != key}
    if rest:
        return {**left, key: _with(config[key], tuple(rest), *values)}
    return {**left, key: values[0]} if values else left
