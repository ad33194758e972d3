"""One training in a fresh process, and its summary.

A measured process shares nothing with other measurements but the machine.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.measure.command import flag, ondevice
from ondevice.errors import UsageError
from runtime.data.run_rows import absolute

PATHS = ("bundle", "data", "eval_data")  # settings that are paths


def measure_training(settings: Mapping[str, object], run: Path) -> dict[str, Any]:
    """Train in the folder `run` with `settings` (fields of TrainConfig); returns its summary.

    A run that was interrupted is continued, and a finished one is not run again.

    Raises:
        UsageError: `run` holds a run of other settings.
        OnDeviceError: as `ondevice`.
    """
    summary = run / "summary.json"
    if (run / "config.toml").exists():
        _check_same(settings, run)
        if not summary.exists():
            ondevice("train", "--resume", str(run), "--json")
    else:
        bundle, *flags = (
            str(value) if name == "bundle" else flag(name, value)
            for name, value in sorted(settings.items(), key=lambda item: item[0] != "bundle")
        )
        ondevice("train", bundle, *flags, f"--output={run}", "--json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def _check_same(settings: Mapping[str, object], run: Path) -> None:
    known = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    different = []
    for name, value in settings.items():
        before = known.get(name)
        if name in PATHS:
            value = absolute(str(value))
        if before != value:
            different.append(f"{name} {before!r} (now {value!r})")
    if different:
        raise UsageError(
            f"{run} holds a run of other settings: {', '.join(different)}; remove it or "
            "choose another folder"
        )
