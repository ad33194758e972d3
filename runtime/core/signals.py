"""The signals that ask a process to end: Ctrl-C, SIGTERM, and the end of its terminal."""

from __future__ import annotations

import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUTS = (1, 2)  # stdout and stderr
_AGAIN_S = 0.02  # by then a finalizer is over

Handler = Callable[[int, FrameType | None], Any]


def handle(handler: Handler) -> dict[signal.Signals, Any]:
    """Call `handler` when a signal asks the process to end; returns the handlers before.

    A signal that the process was told to ignore, as by nohup, stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_terminal()
        handler(number, frame)

    return {
        number: signal.signal(number, end)
        for number in ENDING
        if signal.getsignal(number) != signal.SIG_IGN
    }


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """As `handle`, until the end of the context."""
    before = handle(handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def raised_at_last() -> Iterator[None]:
    """Send a signal again whose KeyboardInterrupt came where nothing can be raised.

    That is in a finalizer or a callback of a library: Python prints the exception there, and the
    program would go on.
    """
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def again(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            heard = next(number for number in ENDING if callable(signal.getsignal(number)))
            main = threading.main_thread().ident
            timers.append(threading.Timer(_AGAIN_S, signal.pthread_kill, [main, heard]))
            timers[-1].start()
        else:
            before(lost)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:  # nothing that comes after would take its signal
            timer.cancel()
            timer.join()


def ignore() -> None:
    """Let no further signal disturb the end of the process."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def drop_terminal() -> bool:
    """Let output go nowhere whose terminal has hung up; returns whether there was any.

    Writing to it fails, and would end the process before its state is saved.
    """
    gone = [output for output in OUTPUTS if _is_gone(output)]
    for output in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
    return bool(gone)


@contextmanager
def surviving_hangup() -> Iterator[None]:
    """Do without output once its terminal is gone, which comes before SIGHUP says so."""
    try:
        yield
    except OSError:
        if not drop_terminal():
            raise


def _is_gone(output: int) -> bool:
    """Whether a file descriptor is that of a terminal which has hung up."""
    try:
        termios.tcgetattr(output)
    except termios.error as problem:  # ENOTTY: a file or a pipe; EBADF: closed by who started us
        return problem.args[0] not in (errno.ENOTTY, errno.EBADF)
    return False


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
