"""Signals that end a run at a whole step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """Whether SIGINT or SIGTERM has arrived."""

    signal: int | None = None


@contextmanager
def catching_signals() -> Iterator[Stop]:
    """Note the first signal and go on to the step's end; a second Ctrl-C ends at once."""
    stop = Stop()

    def note(number: int, frame: Any) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
