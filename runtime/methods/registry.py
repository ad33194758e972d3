"""Finding a training method's implementation by its name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from runtime.config.methods import METHODS
from runtime.config.shared import StepConfig
from runtime.methods.protocol import Implementation


def method(name: str) -> Implementation:
    """The module of a method that `runtime.config.methods` lists."""
    return cast(Implementation, import_module(METHODS[name].module))


def passes_before(config: StepConfig, rows: int | None) -> int:
    """The forward passes that a method makes before its first step, at most.

    `rows` are those of the training data, None where there are more than any method needs. Only the
    module of a method that makes such passes defines `first_passes`.
    """
    counted = getattr(method(config.method), "first_passes", None)
    return 0 if counted is None else int(counted(config, rows))
