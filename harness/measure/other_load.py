"""The load of other programs while a measurement runs, in cores.

A time that is measured on a busy machine says little (threads that wait for each other by spinning
slow down tenfold), so the load is reported beside it. Invariant: our own time, and that of our
children that have ended, is not counted.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
NOT_BUSY = (3, 4)  # indices in its first line: idle, iowait
FIELDS = 8  # guests' time follows, which is part of user time


@dataclass
class OtherLoad:
    """Cores that other programs kept busy on average; None if the system does not say."""

    cores: float | None = None


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure the load while the body runs child processes to their end; known after the body."""
    load = OtherLoad()
    start, busy, own = time.monotonic(), _busy_s(), _own_s()
    try:
        yield load
    finally:
        after = _busy_s()
        if busy is not None and after is not None:
            others = after - busy - (_own_s() - own)
            load.cores = max(0.0, others / (time.monotonic() - start))


def busy_ticks(stat: str) -> int:
    """The time that all cores were at work, or used by other virtual machines; of /proc/stat."""
    fields = [int(field) for field in stat.partition("\n")[0].split()[1 : 1 + FIELDS]]
    return sum(ticks for index, ticks in enumerate(fields) if index not in NOT_BUSY)


def _busy_s() -> float | None:
    try:
        return busy_ticks(STAT.read_text()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _own_s() -> float:
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds
