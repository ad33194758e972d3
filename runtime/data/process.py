"""Runs a module of data in a process of its own, whose memory is not that of training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ondevice.errors import OnDeviceError, StorageError


def run_module(
    module: str, what: str, failure: type[OnDeviceError], *arguments: object, **options: object
) -> None:
    """Run `python -m module` with options such as seq_length=8, until it has done `what`.

    Raises:
        OnDeviceError: a StorageError or a `failure` with what its stderr says, if it ends with the
            exit code of one; a `failure` if it ends in another way.
    """
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    # -P keeps modules of the working directory out; the path lets an uninstalled checkout run
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    said = done.stderr.strip()
    if done.returncode == StorageError.exit_code:
        raise StorageError(said)
    if done.returncode == failure.exit_code:
        raise failure(said)
    if done.returncode:
        last = said.splitlines()[-1] if said else "it said nothing"
        raise failure(f"{what} failed with status {done.returncode}: {last}")
