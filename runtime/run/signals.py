"""Signals that end a run after the current step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runtime.core.signals import handled


@dataclass
class Stop:
    """Which of SIGINT, SIGTERM and SIGHUP has arrived, if any."""

    signal: int | None = None


def cause(number: int, where: str = "") -> str:
    """The signal's name and `where` it arrived, for messages, or what it means under `mpirun`."""
    if number == signal.SIGCONT:
        return "mpirun was told to end"  # all of its processes, the others a moment later
    return f"{signal.Signals(number).name}{where}"


@contextmanager
def catching_signals(was_stopped: Callable[[], bool] | None = None) -> Iterator[Stop]:
    """Record the first signal, so that the step can end; a second one ends the process at once.

    `mpirun` begins to end its processes by SIGCONT, and sends SIGTERM and SIGKILL after a second
    each. So processes that it has started give `was_stopped`, which says whether a SIGCONT only
    lets this one go on.
    """
    stop = Stop()

    def note(number: int, frame: Any) -> None:
        if stop.signal not in (None, signal.SIGCONT):
            raise KeyboardInterrupt
        stop.signal = number

    def go_on(number: int, frame: Any) -> None:
        if stop.signal is None and was_stopped is not None and not was_stopped():
            stop.signal = number

    before = None if was_stopped is None else signal.signal(signal.SIGCONT, go_on)
    try:
        with handled(note):
            yield stop
    finally:
        if was_stopped is not None:
            signal.signal(signal.SIGCONT, before)
