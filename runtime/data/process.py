"""Runs a module of data in a process of its own, whose memory is not that of training."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from runtime.core.errors import DataError, OnDeviceError, StorageError, UsageError
from runtime.data.limits import Limits, confine

# threads reserve address space, which is limited
_FEW_THREADS = {
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_module(
    module: str,
    task: str,
    *arguments: object,
    limits: Limits | None = None,
    given: str = "",
    failure: type[OnDeviceError] = DataError,
    **options: Any,
) -> str:
    """Run `python -m module` with options such as seq_length=8, until it has done its `task`.

    It reads `given` on stdin, and its stdout is returned. The module puts itself
    under the limits, see `confined`.

    Raises:
        OnDeviceError: a UsageError, a StorageError or a `failure` with its stderr as message, if it
            ends with the exit code of one; a `failure` if it ends in another way.
    """
    import subprocess  # here, since training on data that are ready can do without its memory

    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    # -P keeps modules of the working directory out; the path lets an uninstalled checkout run
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    if limits is not None:
        command.append(f"--limits={msgspec.json.encode(limits).decode()}")
        environment |= _FEW_THREADS
    done = subprocess.run(
        command,
        env=environment,
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    said = done.stderr.strip()
    for error in (UsageError, StorageError, failure):
        if done.returncode == error.exit_code:
            raise error(said)
    last = said.splitlines()[-1] if said else "it said nothing"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        under = "" if limits is None else f"; it may take {limits.describe()}"
        first = said.splitlines()[0] if said else last
        raise failure(f"{task} was ended by {name}{under}: {first}")
    if done.returncode:
        raise failure(f"{task} failed with status {done.returncode}: {last}")
    return done.stdout


def limits_argument(parser: argparse.ArgumentParser) -> None:
    """Give a module's parser the option by which `run_module` limits it."""
    parser.add_argument("--limits", help="Limits of this process, as JSON (default: none)")


def confined(limits: str | None, work: Callable[[], None]) -> int:
    """Do the work of a module under its limits; complaints go to stderr. Returns the exit code."""
    parsed = None if limits is None else msgspec.json.decode(limits, type=Limits)
    try:
        if parsed is not None:
            confine(parsed)
        work()
    except OnDeviceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except MemoryError:
        under = (
            "the system gives no more"
            if parsed is None
            else f"this process may take {parsed.describe()}"
        )
        sys.stderr.write(f"there is not enough memory: {under}\n")
        return DataError.exit_code
    return 0
