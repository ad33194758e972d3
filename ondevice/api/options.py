"""Keywords of a call as a command's configuration, and what help says of them in a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from runtime.bundle.store import Bundle
from runtime.config.base import Config, load

C = TypeVar("C", bound=Config)
P = ParamSpec("P")
R = TypeVar("R")


def configured(cls: type[C], options: Mapping[str, Any]) -> C:
    """The configuration that a call's keywords give, checked as the command line checks flags.

    A bundle may be open, and paths may be `Path`.

    Raises:
        UsageError: an unknown name, a missing one, or a value that is not allowed; it lists all.
    """
    return load(cls, None, {name: plain(value) for name, value in options.items()})


def plain(value: Any) -> Any:
    """A value as configurations take it: paths, and bundles by their path, as text."""
    if isinstance(value, Bundle):
        return str(value.path)
    return str(value) if isinstance(value, Path) else value


def taking(cls: type[Config], *without: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show the fields of a configuration in a function's signature and docstring.

    The function takes them as `**options`. Those that it names itself, and those in `without`, are
    not repeated.
    """

    def shown(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        skipped = {*without, *(one.name for one in own)}
        more = [one for one in fields(cls) if one.name not in skipped]
        parameters = [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.default is MISSING else one.default,
                annotation=one.type,
            )
            for one in more
        ]
        lines = [f"    {one.name}: {one.metadata['help']}" for one in more]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:"])
        function.__doc__ += "\n" + "\n".join(lines)
        replaced = signature.replace(parameters=[*own, *parameters])
        vars(function)["__signature__"] = replaced
        return function

    return shown
