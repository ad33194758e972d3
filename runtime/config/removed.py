"""Removed options and methods of `ondevice train`: runs of earlier versions may still name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.config.base import from_values, read_values
from runtime.config.methods import REMOVED_METHODS
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError

# options without which a run goes on to the same bits, and the effect that is gone
OPTIONS = {"heap_relief": "no heap memory is given back near the predicted peak"}


def load_run(
    file: Path, overrides: dict[str, Any], note: Callable[[str], None] | None = None
) -> TrainConfig:
    """The configuration in a run's config.toml, as `load`; `note` is told of dropped options.

    Raises:
        UsageError: the run's method was removed, or as `load`.
    """
    values = read_values(file)
    if (name := values.get("method")) in REMOVED_METHODS:
        raise UsageError(
            f"{file}: the method {name} was removed; go on with the version of ondevice that began "
            "this run, or begin another with one of the methods in ondevice train --help"
        )
    values.setdefault("also_evaluate", [])  # nothing was measured before such a run
    for key in OPTIONS.keys() & values.keys():
        del values[key]
        if note is not None:
            note(f"{file}: {key} was removed and is left out: {OPTIONS[key]}")
    return from_values(TrainConfig, values, overrides)
