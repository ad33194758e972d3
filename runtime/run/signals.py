"""Signals that end a run after the current step."""

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
    """Record the first signal, so that the step can end; a second Ctrl-C ends at once."""
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
