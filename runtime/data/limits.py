"""Limits on what a piece of foreign code may take of this process: memory, and time of the CPU."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class TooSlowError(Exception):
    """The code has taken more seconds of the CPU than it may."""


@contextmanager
def bounded_memory(most_bytes: int) -> Iterator[None]:
    """Let this process map at most so many more bytes (RLIMIT_AS), where the system tells how many.

    Beyond that, allocating raises MemoryError.
    """
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    used = int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with _lowered(resource.RLIMIT_AS, used + most_bytes):
        yield


@contextmanager
def bounded_seconds(most_s: int) -> Iterator[None]:
    """Let this process compute for at most so many seconds more (RLIMIT_CPU), to the second.

    Beyond that, TooSlowError is raised at the next line of Python. Only a main thread can be
    interrupted; others are not bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    usage = resource.getrusage(resource.RUSAGE_SELF)
    before = signal.signal(signal.SIGXCPU, interrupt)
    try:
        with _lowered(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + most_s):
            yield
    finally:
        signal.signal(signal.SIGXCPU, before)


@contextmanager
def _lowered(kind: int, wanted: int) -> Iterator[None]:
    """A limit of this process that is at most `wanted` meanwhile."""
    soft, hard = resource.getrlimit(kind)
    bounds = [one for one in (wanted, soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
