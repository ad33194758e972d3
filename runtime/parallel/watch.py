"""An end to the waiting of MPI, and of `mpirun`, for processes that are stopped or cut off."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.core.control_characters import shown
from runtime.parallel.launch import host_name, launched

START_S, END_S = 20.0, 20.0  # in which all processes must have begun and met, and end together
LAUNCHER_S = 8.0  # in which `mpirun` ends its processes, where it can reach them
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")


@contextmanager
def in_time() -> Iterator[None]:
    """As `watch`, for the beginning: until the end of the context."""
    end = watch(START_S, "begin: one is stopped, or its machine cannot be reached; start again")
    try:
        yield
    finally:
        end()


def watch_end() -> None:
    """As `watch`, until this process has ended."""
    watch(END_S, "end: one is stopped, or cannot be reached; what this one did is complete")


def watch(seconds: float, waits_for: str) -> Callable[[], None]:
    """Kill this process, with a message, unless it ends or calls the result in so many seconds.

    MPI's start and end wait without an end for a process that is stopped or cut off, and hold the
    interpreter's lock meanwhile. So a child process keeps the time.
    """
    reader, writer = os.pipe()
    waiting, started_by = os.getpid(), launcher()
    who = f"rank {launched().rank} on {host_name()}"
    said = f"ondevice: {who} has waited {seconds:.0f} s for the other processes to {waits_for}\n"
    said = shown(said, sys.stderr) if sys.stderr else ""  # else 2 may be any file
    child = os.fork()
    if not child:
        try:  # whatever fails, it must not go on as a second copy of its parent
            os.setsid()  # mpirun's signals are not for it
            os.close(writer)
            if not select.select([reader], [], [], seconds)[0]:  # closed where the process goes on
                with suppress(OSError):  # nobody reads it
                    os.write(2, said.encode())
                os.kill(waiting, signal.SIGKILL)
                end_launcher(started_by)
        finally:
            os._exit(0)
    os.close(reader)

    def end() -> None:
        os.close(writer)
        os.kill(child, signal.SIGKILL)  # if it is stopped, it does not see the end
        os.waitpid(child, 0)

    return end


def launcher() -> int | None:
    """A descriptor of the `mpirun` that has started this process; None without one, or on a Mac."""
    if sys.platform == "linux":
        with suppress(OSError):
            parent = os.getppid()
            if Path(f"/proc/{parent}/comm").read_text().strip() in LAUNCHERS:
                return os.pidfd_open(parent)
    return None


def end_launcher(descriptor: int | None, after_s: float = LAUNCHER_S) -> None:
    """Kill `mpirun` if it has not ended after so long; this process, which waits for it, ends too.

    It waits without an end for the processes of a machine that cannot be reached.
    """
    try:
        if sys.platform == "linux" and descriptor is not None:
            if not select.select([descriptor], [], [], after_s)[0]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
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
