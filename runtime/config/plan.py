"""The options of `ondevice plan`, which shows how training would use a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.base import FILLED, Group, option
from runtime.config.shared import StepConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig(StepConfig):
    """The options of `ondevice plan`, which shows how training would use a memory budget."""

    machine: str | None = option(
        None,
        "JSON file of the machine to plan for, written there by `ondevice bench machine` "
        "(default: this machine)",
        FILLED,
        Group.MEMORY,
        metavar="FILE",
    )
