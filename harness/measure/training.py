"""One training in a fresh process, and its summary.

A measured process shares nothing with other measurements but the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.measure.command import flag, mpirun, ondevice
from runtime.config.base import read_values
from runtime.config.parallel import grid_of
from runtime.core.errors import UsageError
from runtime.data.run_rows import absolute
from runtime.run.folder import read_json

PATHS = ("bundle", "data", "eval_data")  # settings that are paths


def measure_training(settings: Mapping[str, object], run: Path) -> dict[str, Any]:
    """Train in the folder `run` with `settings` (fields of TrainConfig); returns its summary.

    `mpirun` starts the processes of a setting `parallel`.

    A run that was interrupted is continued, one of fewer steps goes on to as many, and a finished
    one is not run again; so the summary of a run that has gone further is returned as it is.

    Raises:
        UsageError: `run` holds a run of other settings.
        OnDeviceError: as `ondevice`.
    """
    settings = dict(settings)
    parallel = settings.pop("parallel", None)  # which the run does not keep
    launcher = mpirun(grid_of(str(parallel)).size) if parallel else ()
    shared = [flag("parallel", parallel)] if parallel else []
    summary = run / "summary.json"
    if (run / "config.toml").exists():
        more = _check_same(settings, run)
        if more or not _is_finished(run):
            ondevice("train", "--resume", str(run), *more, *shared, "--json", launcher=launcher)
    else:
        bundle, *flags = (
            str(value) if name == "bundle" else flag(name, value)
            for name, value in sorted(settings.items(), key=lambda item: item[0] != "bundle")
        )
        ondevice("train", bundle, *flags, *shared, f"--output={run}", "--json", launcher=launcher)
    return read_json(summary)


def _is_finished(run: Path) -> bool:
    """Whether the run's summary is of all steps; one of fewer is left where it began to go on."""
    if not (run / "summary.json").exists():
        return False
    summary = read_json(run / "summary.json")
    steps: int = read_values(run / "config.toml")["steps"]
    return bool(summary["stopped"] != "steps" or summary["steps"] >= steps)


def _check_same(settings: Mapping[str, object], run: Path) -> list[str]:
    """Compare the settings; returns the flags with which the run goes on to more steps."""
    known = read_values(run / "config.toml")
    different = []
    for name, value in settings.items():
        before = known.get(name)
        if name == "steps":
            continue
        if name in PATHS:
            value = absolute(str(value))
        if before != value:
            different.append(f"{name} {before!r} (now {value!r})")
    if different:
        raise UsageError(
            f"{run} holds a run of other settings: {', '.join(different)}; remove it or "
            "choose another folder"
        )
    wanted = settings.get("steps")
    if isinstance(wanted, int) and wanted > known["steps"]:
        return [flag("steps", wanted)]
    return []
