"""The processes that `mpirun` has started together, as their environment says."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LAUNCHER_S = 5.0  # in which `mpirun` ends its processes, where it can reach them
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")


class Launched(NamedTuple):
    """Which of how many processes this one is, and how many of them are on this machine."""

    rank: int
    size: int
    here: int


def launched() -> Launched:
    """This process among those that Open MPI's `mpirun` has started; it alone without that."""
    rank, size, here = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", alone))
        for name, alone in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_SIZE", "1"))
    )
    return Launched(rank, size, here)


def speaks() -> bool:
    """Whether this process shows results and progress: of several, rank 0 alone does."""
    return launched().rank == 0


def launcher() -> int | None:
    """A descriptor of the `mpirun` that has started this process; None without one, or on a Mac."""
    with suppress(OSError):
        parent = os.getppid()
        if Path(f"/proc/{parent}/comm").read_text().strip() in LAUNCHERS:
            return os.pidfd_open(parent)
    return None


def end_launcher(descriptor: int | None, after_s: float = LAUNCHER_S) -> None:
    """Kill `mpirun` if it has not ended after so long; this process, which waits for it, ends too.

    It waits without an end for the processes of a machine that cannot be reached.
    """
    if descriptor is not None and not select.select([descriptor], [], [], after_s)[0]:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os._exit(0)


def leave_launcher(after_s: float = LAUNCHER_S) -> None:
    """Have a process of its own do as `end_launcher`, while this one ends."""
    descriptor = launcher()
    if descriptor is None or os.fork():
        return
    os.setsid()  # mpirun's signals are not for it
    os.closerange(0, descriptor)  # others wait for the end of this process's connections
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    end_launcher(descriptor, after_s)


def way_to_start(count: int, parallel: str, command: str) -> str:
    """The command that starts so many workers, for a message."""
    return f"mpirun -n {count} ondevice {command} ... --parallel {parallel}"
