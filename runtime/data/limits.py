"""Limits for foreign code in a process: memory, and time of the CPU.

Chat templates and tokenizers are programs of whoever published a model. They run in processes of
their own, which `confine` limits for good: the system ends whatever passes the limits, in C code
too. Inside, `bounded_memory` and `bounded_seconds` give one conversation less than that, and
passing these raises an exception.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from runtime.machine.footprint import mapped_bytes

GRACE_SECONDS = 2  # after which code that no exception reaches is ended with its process
_TICKS_CLOCK = -8  # Linux's clock of this process that RLIMIT_CPU goes by
# the code that ends a `with` block
RESTORING = frozenset((__file__, contextlib.__file__, signal.__file__))


class TooSlowError(Exception):
    """The code has taken more seconds of the CPU than it may."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process: bytes of address space beyond those at its start, and seconds."""

    memory_bytes: int
    cpu_s: int

    @classmethod
    def of_data(cls, size_bytes: int) -> Limits:
        """The limits for reading so many bytes of data.

        The constant parts are for libraries, and one conversation at its own limits. A JSON file
        becomes some 10 bytes of Python's for each of its own, a long row some 50 while it is
        tokenized. Packed files may be ten times larger than they look. The slowest data, short
        conversations, take 10 microseconds a byte; this allows 400.
        """
        return cls(memory_bytes=(4 << 30) + 64 * size_bytes, cpu_s=60 + size_bytes // 2_500)

    def describe(self) -> str:
        """The limits in words, by their names."""
        return (
            f"{self.memory_bytes / 1e9:.1f} GB of memory (RLIMIT_AS) and {self.cpu_s} s of the CPU "
            "(RLIMIT_CPU)"
        )


def confine(limits: Limits) -> None:
    """Limit this process for the rest of its life.

    macOS may refuse a limit of memory; then there is none.
    """
    spent = spent_s()
    _lower(resource.RLIMIT_CPU, spent + limits.cpu_s, spent + limits.cpu_s + GRACE_SECONDS)
    most_bytes = mapped_bytes() + limits.memory_bytes
    with suppress(*((OSError, ValueError) if sys.platform == "darwin" else ())):
        _lower(resource.RLIMIT_AS, most_bytes, most_bytes)


@contextmanager
def bounded_memory(most_bytes: int) -> Iterator[None]:
    """Let this process map at most so many more bytes (RLIMIT_AS), on Linux.

    Beyond that, allocating raises MemoryError. macOS's heap maps gigabytes ahead of need, which a
    limit so close would refuse.
    """
    if sys.platform == "darwin":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [mapped_bytes() + most_bytes, soft, hard]
    lowest = min(bound for bound in bounds if bound != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def bounded_seconds(most_s: int) -> Iterator[None]:
    """Let this process compute for at most so many seconds more (ITIMER_PROF).

    Beyond that, TooSlowError is raised at the next line of Python, and again in each further second
    until the code ends, since a callback may have swallowed it. The code that ends the block is not
    interrupted. Where no line of Python comes for GRACE_SECONDS, ITIMER_VIRTUAL ends a process that
    `confine` has limited. Only a main thread can be interrupted; others are not bounded.

    RLIMIT_CPU does not serve: macOS tells a process only once that it has passed it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_filename not in RESTORING:
            raise TooSlowError

    before = signal.signal(signal.SIGPROF, interrupt)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    try:
        signal.setitimer(signal.ITIMER_PROF, most_s, 1)
        if hard != resource.RLIM_INFINITY:  # others may have threads that take Python's signals
            signal.setitimer(signal.ITIMER_VIRTUAL, most_s + GRACE_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def spent_s() -> int:
    """Seconds of the CPU that this process has taken as RLIMIT_CPU counts them, rounded up.

    Linux holds the limit against a clock that counts in ticks, which in a process that has run for
    minutes on a busy machine may be seconds ahead of the exact one of `getrusage`.
    """
    if sys.platform == "linux":
        return int(time.clock_gettime(_TICKS_CLOCK)) + 1
    return int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1


def _lower(kind: int, soft: int, hard: int) -> None:
    """Lower a limit of this process, and the hard limit, to which it may be raised again."""
    now = resource.getrlimit(kind)
    wanted = [
        limit if there == resource.RLIM_INFINITY else min(limit, there)
        for limit, there in zip((soft, hard), now, strict=True)
    ]
    resource.setrlimit(kind, (min(wanted), wanted[1]))
