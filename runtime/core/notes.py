"""What is said to the user while something is done: lines for people, some of them warnings."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Receives what is being done, how much of it is done, and how much there is in all."""

_WARNING = "ondevice: warning: "


def warning(text: str) -> str:
    """A note that warns."""
    return f"{_WARNING}{text}"


def warned_of(note: str) -> str:
    """What a note warns of; empty if it is no warning."""
    return note.removeprefix(_WARNING) if note.startswith(_WARNING) else ""
