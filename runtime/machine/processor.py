"""The processor, by what Linux says of it."""

from __future__ import annotations

import sys
from pathlib import Path


def cpu_flags() -> set[str]:
    """The instructions of the processor, by the names of Linux; empty elsewhere."""
    if sys.platform != "linux":
        return set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def model() -> str:
    """The processor's name and instructions, which decide how code is compiled for it."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model", "flags")))
