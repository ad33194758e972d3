"""Notes to the user while work goes on: lines for people, some of them warnings."""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str], None]
"""Receives a line for people."""

Progress = Callable[[str, int, int], None]
"""Receives the name of the work, how much of it is done, and how much there is in all."""


def silent(text: str) -> None:
    """A receiver of notes that shows nothing."""


def no_progress(work: str, done: int, total: int) -> None:
    """A receiver of progress that shows nothing."""


_WARNING = "ondevice: warning: "


def warning(text: str) -> str:
    """A note that warns."""
    return f"{_WARNING}{text}"


def warned_of(note: str) -> str:
    """The text of a warning; empty if the note is none."""
    return note.removeprefix(_WARNING) if note.startswith(_WARNING) else ""


class Said:
    """The warnings of one command, each of which is said once, however many have cause for it."""

    def __init__(self) -> None:
        self._warnings: set[str] = set()

    def is_news(self, note: str) -> bool:
        """Whether a note is to be said: it is no warning, or its first."""
        if note in self._warnings:
            return False
        if warned_of(note):
            self._warnings.add(note)
        return True

    def forget(self) -> None:
        """Begin another command."""
        self._warnings.clear()
