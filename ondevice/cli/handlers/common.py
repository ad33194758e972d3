"""Shared by the handlers: reading a configuration, setting the process up, and printing."""

from __future__ import annotations

import argparse
import json
from typing import TypeVar

from ondevice.cli.screen import note, out
from runtime.config.arguments import given
from runtime.config.base import Config, load
from runtime.core.notes import warning

C = TypeVar("C", bound=Config)


def configuration(cls: type[C], arguments: argparse.Namespace) -> C:
    """The configuration that a command was given, in its file and its flags."""
    return load(cls, arguments.config, given(arguments, cls))


def set_up(keep_heap: bool = True) -> None:
    """Set the process up before MLX is imported; warn where that leaves it slow."""
    from runtime.machine.backend import prepare

    prepared = prepare(keep_heap)
    if prepared.warning:
        note(warning(prepared.warning))


def show(result: object, text: str, as_json: bool, is_data: bool = False) -> None:
    """Print a result as JSON, or the text that tells it."""
    if as_json:
        print_json(result)
    else:
        out(text, is_data=is_data)


def print_json(result: object, indent: int | None = None) -> None:
    """Print a result, a struct or a value of JSON, as JSON: one line of it without `indent`."""
    import msgspec

    out(json.dumps(msgspec.to_builtins(result, str_keys=True), indent=indent), is_data=True)
