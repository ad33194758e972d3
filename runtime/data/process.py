"""Runs a module of data in a process of its own, whose memory is not that of training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ondevice.errors import DataError, StorageError


def run_module(module: str, what: str, *arguments: object, **options: object) -> None:
    """Run `python -m module` with options such as seq_length=8, until it has done `what`.

    Raises:
        DataError, StorageError: what its stderr says, if it ends with their exit code.
        DataError: it ended in another way.
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
    if done.returncode == DataError.exit_code:
        raise DataError(said)
    if done.returncode:
        last = said.splitlines()[-1] if said else "it said nothing"
        raise DataError(f"{what} failed with status {done.returncode}: {last}")
