"""Where a measurement comes from: the version, the commit, the machine, and the repository."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.measure.process import ROOT
from runtime.core.errors import UsageError
from runtime.core.version import __version__
from runtime.machine.backend import describe

PARTS = ("harness.peers", "harness.tasks")  # that pyproject.toml leaves out of the wheel


def provenance() -> dict[str, Any]:
    """The version, and the commit of a checkout ("-dirty": with changes that are not committed)."""
    return {"version": __version__, "commit": _commit()}


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        return done.stdout.strip() if done.returncode == 0 else ""

    if shutil.which("git") is None or git("rev-parse", "--show-toplevel") != str(ROOT):
        return None  # installed, or inside a checkout of something else
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def machine() -> dict[str, Any]:
    """The machine, the versions, and the load average at the start."""
    return {
        **describe(),
        "cpu": processor_name(),
        "memory_bytes": memory_bytes(),
        "load": os.getloadavg()[0],
        "numpy": metadata.version("numpy"),
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }


def processor_name() -> str:
    """The name of the processor, as its maker gives it."""
    if sys.platform == "darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(words, capture_output=True, encoding="utf-8").stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def repository_only() -> Iterator[None]:
    """Modules of `PARTS` are imported inside of it.

    Raises:
        UsageError: they are not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in PARTS:
            raise
        raise UsageError(
            f"{missing.name} is in the repository of ondevice only; clone it, and there run "
            "`pip install -e .` and this command"
        ) from None
