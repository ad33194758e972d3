"""A forked child that does one piece of work, and how it ended: by itself, by a signal, or late.

A fork of a process that has imported everything costs milliseconds. The parent must never compute
with MLX, whose threads a fork does not take along.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from support.waiting import HANGS_S

from runtime.core.errors import OnDeviceError
from runtime.machine.footprint import mapped_bytes

SECONDS = 10  # of the CPU that a case may take
WAITING_S = HANGS_S  # on the clock, for a case that waits for what never comes
MEMORY_BYTES = 4 << 30  # that a case may map beyond what is imported
FILE_BYTES = 1 << 30  # that a file may have
PR_SET_PDEATHSIG = 1  # of Linux's prctl
FAILED = 99  # the exit code of work that raised what no user should see

Tell = Callable[[Any], None]
Work = Callable[[Tell], int]


@dataclass(frozen=True)
class Ended:
    """How a child has ended.

    told: what its work told, values of JSON. said: what it wrote to stdout and stderr. code: its
    exit code. signal: what ended it, or 0. late: it took more than its time, killed or not.
    """

    told: list[Any]
    said: str
    code: int
    signal: int
    late: bool


def in_child(
    work: Work, said: Path, seconds: float = SECONDS, kill_after_s: float | None = None
) -> Ended:
    """Do `work` in a forked child, the leader of a group of processes that end with it.

    work: gets a function that tells the parent a value, and returns an exit code.
    kill_after_s: SIGKILL comes then, unless the child has ended.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(work, writing, said, seconds)
    os.close(writing)
    with suppress(PermissionError, ProcessLookupError):  # the child has done it, or is gone
        os.setpgid(pid, pid)
    text, in_time = _read_to_end(reading, WAITING_S if kill_after_s is None else kill_after_s)
    os.close(reading)
    if in_time:
        _await_end(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    slow = usage.ru_utime + usage.ru_stime > seconds
    return Ended(
        told=[json.loads(line) for line in text.splitlines()],
        said=said.read_text(errors="replace") if said.exists() else "",
        code=max(code, 0),
        signal=max(-code, 0),
        late=slow or (kill_after_s is None and not in_time),
    )


def _read_to_end(reading: int, seconds: float) -> tuple[str, bool]:
    """What is written until all writers have ended, and whether they did in time."""
    text, ends_s = b"", time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        if select.select([reading], [], [], left_s)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return text.decode(), True
            text += part
    whole, _, _ = text.rpartition(b"\n")
    return whole.decode(), False


def _work(work: Work, writing: int, said: Path, seconds: float) -> NoReturn:
    """Do the work and end the process, whatever happens."""
    code = FAILED
    try:
        with suppress(PermissionError):  # the parent was faster
            os.setpgid(0, 0)
        _end_with_parent()
        _redirect(said)
        _limit(seconds)
        os.environ["TMPDIR"] = str(said.parent)
        tempfile.tempdir = None

        def tell(value: Any) -> None:
            os.write(writing, json.dumps(value).encode() + b"\n")

        code = work(tell)
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        code = problem.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED
    except BaseException:  # panics of libraries in Rust are not Exceptions
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with_parent() -> None:
    """Let SIGKILL come when the parent has ended, where Linux can do that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(said: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # whoever captures the parent's output has put other objects there
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _limit(seconds: float) -> None:
    """Bound the time of the CPU, memory and the size of files; leave no core dump behind."""
    enough = int(seconds) + 2
    _lower(resource.RLIMIT_CPU, enough, enough + 5)
    _lower(resource.RLIMIT_CORE, 0, 0)
    _lower(resource.RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES)
    most_bytes = mapped_bytes() + MEMORY_BYTES
    _lower(resource.RLIMIT_AS, most_bytes, most_bytes)


def _await_end(pid: int) -> None:
    """Wait until a child has ended, which stays to be waited for."""
    if sys.platform == "darwin":
        raise OSError("CPython 3.11 for macOS has no waitid, and a forked child cannot use Metal")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _lower(kind: int, soft: int, hard: int) -> None:
    """Set a limit that is no higher than it is, as in a child's child."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))
