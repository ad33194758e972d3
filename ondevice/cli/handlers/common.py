"""Shared by the handlers: setting the process up, and printing."""

from __future__ import annotations

import json

from ondevice.cli.screen import note, out
from runtime.core.notes import warning


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
