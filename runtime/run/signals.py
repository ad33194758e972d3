"""Signals that end a run after the current step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runtime.core.signals import handled


@dataclass
class Stop:
    """Which of SIGINT, SIGTERM and SIGHUP has arrived, if any."""

    signal: int | None = None


@contextmanager
def catching_signals() -> Iterator[Stop]:
    """Record the first signal, so that the step can end; a second one ends the process at once."""
    stop = Stop()

    def note(number: int, frame: Any) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number

    with handled(note):
        yield stop
