"""Training runs for tests, by the command line in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "ondevice"]


def ondevice(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, **options
    )


def train_arguments(bundle: Path, run: Path, steps: int, **more: object) -> list[str]:
    given = {
        "data": "random:5",
        "max-seq-length": 24,
        "steps": steps,
        "batch-size": 2,
        "budget": "200MB",
        "save-every": 1,
        "output": run,
        "learning-rate": 1e-2,
        "lr-schedule": "cosine",
        **{key.replace("_", "-"): value for key, value in more.items()},
    }
    return ["train", str(bundle), *(f"--{key}={value}" for key, value in given.items())]


def adapter(run: Path) -> bytes:
    return (run / "adapters.safetensors").read_bytes()
