"""Runs commands of `ondevice` in fresh processes, and raises their errors here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from harness.measure.process import ERROR, WARNING, run
from runtime.core.errors import (
    BudgetError,
    BundleError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    StorageError,
    UsageError,
)

_ERRORS: dict[int, type[OnDeviceError]] = {
    error.exit_code: error
    for error in (UsageError, BudgetError, BundleError, StorageError, DivergedError)
}


def ondevice(*arguments: str, module: str = "ondevice", launcher: Sequence[str] = ()) -> str:
    """Run a command of the command line in a fresh process; returns its stdout.

    `module` may be another module that runs with `-m` and reports errors in the same way.
    `launcher` are words before the command, such as those of `mpirun`.

    Raises:
        OnDeviceError: the process reported an error; its text and exit code are kept.
        InterruptedRunError: SIGINT, SIGTERM or SIGHUP arrived; the process has saved and ended.
    """
    ended = run([*launcher, sys.executable, "-P", "-m", module, *arguments])
    name = f"{module} {arguments[0]}"
    message = _message(ended.stderr)
    if ended.interrupted or ended.code == InterruptedRunError.exit_code:
        raise InterruptedRunError(message or "interrupted before the process had begun")
    if ended.code == 0:
        return ended.output
    if ended.code < 0 or not message:
        raise OnDeviceError(ended.failure(f"the process of `{name}`"))
    raise _ERRORS.get(ended.code, OnDeviceError)(message)


def mpirun(count: int) -> list[str]:
    """The words that start so many processes of a command, here or on the hosts of Open MPI's file.

    They have 20 s to save when a signal comes or one is lost; `mpirun` always waits so long then.

    Raises:
        UsageError: it is not installed.
    """
    if shutil.which("mpirun") is None:
        raise UsageError(
            "mpirun is not there, which starts several processes; install Open MPI (apt install "
            "openmpi-bin, brew install open-mpi)"
        )
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    free = ["--oversubscribe", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "10"]
    return ["mpirun", "-q", *as_root, *free, "-n", str(count)]


def flag(name: str, value: object) -> str:
    """An option as it is typed, such as --no-profile or --max-seq-length=256."""
    words = name.replace("_", "-")
    if isinstance(value, list):
        (value,) = value  # of several, each would be an option
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words}={value}"


def _message(stderr: str) -> str:
    """The error message at the end of a command's stderr; empty if there is none."""
    lines = [line.rpartition("\r")[2] for line in stderr.replace("\r\n", "\n").split("\n")]
    starts = [
        index
        for index, line in enumerate(lines)
        if line.startswith(ERROR) and not line.startswith(WARNING)
    ]
    if not starts:
        return ""
    return "\n".join(lines[starts[-1] :]).removeprefix(ERROR).strip()
