"""How much of the machine other programs used while ours ran.

A time measured beside a busy neighbour says little (threads that wait for each other by spinning
slow down tenfold), so it is told together with the neighbour's share. Invariant: our own time and
that of our children, ended by then, is never counted as others'.
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
NOT_BUSY = (3, 4)  # of the fields of its first line: idle, iowait
FIELDS = 8  # the guests' time that follows is counted in user time already


@dataclass
class OtherLoad:
    """Cores that others kept busy on average; None where the system does not tell."""

    cores: float | None = None


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Watch others while the body runs children to their end; known when it is left."""
    found = OtherLoad()
    start, busy, own = time.monotonic(), _busy_s(), _own_s()
    try:
        yield found
    finally:
        after = _busy_s()
        if busy is not None and after is not None:
            others = after - busy - (_own_s() - own)
            found.cores = max(0.0, others / (time.monotonic() - start))


def busy_ticks(stat: str) -> int:
    """The time that all cores were at work or taken away, of the text of /proc/stat."""
    fields = [int(field) for field in stat.partition("\n")[0].split()[1 : 1 + FIELDS]]
    return sum(ticks for index, ticks in enumerate(fields) if index not in NOT_BUSY)


def _busy_s() -> float | None:
    try:
        return busy_ticks(STAT.read_text()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _own_s() -> float:
    found = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found += usage.ru_utime + usage.ru_stime
    return found
