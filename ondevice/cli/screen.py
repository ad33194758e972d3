"""All that a command writes: results on stdout, notes on stderr, and a line of progress below.

A terminal is shown prose in lines of at most 80 columns. Files and pipes get lines whole, since
programs read them line by line; data stay whole everywhere.
Text from data can hold control characters. A terminal would obey them, so it is shown them escaped;
files and pipes get the text as it is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from runtime.core.control_characters import COLUMNS, shown
from runtime.core.notes import Said
from runtime.core.signals import surviving_hangup

REDRAWN_S = 0.05  # a line of progress is drawn again no sooner
SAID_S = 30.0  # and written again no sooner where there is no terminal
BAR = 10  # columns of a bar, where it fits
_CLEAR = "\x1b[2K\r"


class _Progress:
    """The line of progress; `drawn_at` is None while it does not stand on the terminal.

    Without one, `task` is the work that it tells of, and `said_at` when that began or was told.
    """

    text = ""
    drawn_at: float | None = None
    task = ""
    said_at = 0.0


said = Said()


def out(text: str = "", end: str = "\n", *, is_data: bool = False, coloured: bool = False) -> None:
    """Print a result on stdout, without a line of progress before it.

    is_data: its lines are not folded. coloured: it is data with colours of ours, in which what
    comes from elsewhere is escaped already.
    """
    _clear()
    sys.stdout.write((text if coloured else shown(text, sys.stdout, is_data)) + end)
    sys.stdout.flush()


@surviving_hangup()
def note(text: str, end: str = "\n") -> None:
    """Print a line on stderr, above the line of progress; of equal warnings the first alone."""
    if not said.is_news(text):
        return
    _clear()
    sys.stderr.write(shown(text, sys.stderr) + end)
    sys.stderr.flush()
    _draw()


@surviving_hangup()
def progress(parts: Sequence[str] = (), share: float = 0.0) -> None:
    """Show a line of progress on stderr in place of the last, if that is a terminal.

    Elsewhere a task that takes long is told in a line of its own from time to time.
    parts: what it says, the most important first, which begins with the task and a colon; those
    that do not fit are left out. Without any the line goes. share: how much is done.
    """
    if not sys.stderr.isatty():
        _say(parts)
        return
    _Progress.text = fitted(parts, share, _columns() - 1) if parts else ""
    if not parts:
        _clear()
    elif _Progress.drawn_at is None or time.monotonic() - _Progress.drawn_at >= REDRAWN_S:
        _draw()


def _say(parts: Sequence[str]) -> None:
    task, now = parts[0].rpartition(": ")[0] if parts else "", time.monotonic()
    if task != _Progress.task:
        _Progress.task, _Progress.said_at = task, now
    elif task and now - _Progress.said_at >= SAID_S:
        _Progress.said_at = now
        note(parts[0])


def fitted(parts: Sequence[str], share: float, columns: int) -> str:
    """The first of the parts in so many columns, after a bar where there is room for one."""
    line = parts[0][:columns]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line += f", {part}"
    if len(line) + BAR + 3 > columns:
        return line
    return f"[{'#' * round(BAR * share):{BAR}}] {line}"


def _draw() -> None:
    if _Progress.text:
        sys.stderr.write(_CLEAR + _Progress.text)
        sys.stderr.flush()
        _Progress.drawn_at = time.monotonic()


def _clear() -> None:
    if _Progress.drawn_at is not None:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
        _Progress.drawn_at = None


def _columns() -> int:
    return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
