"""What the processes of a gate make once and all read: tiny bundles, the real model, trained runs.

Nobody changes what lies here; a test that does copies it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Make = Callable[[Path], object]
Shared = Callable[[str, Make], Path]


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of one pytest run see, and no other run."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, key: str, make: Make) -> Path:
    """The path at which `make` has made what `key` tells, in whichever process came first."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path, done = folder / name, folder / f"{name}.done"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)  # of an attempt that failed
            make(path)
            done.touch()
    return path
