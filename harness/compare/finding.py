"""The results of a comparison for one method: its sweep, its run and its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.compare.curve import Curve
from harness.compare.trials import Trial, Tried


@dataclass(frozen=True)
class Finding:
    """A method's sweep and its run.

    `chosen` is the index of the trial that was run, `outcome` "finished", "diverged" or "over
    budget"; `curve`, `summary` and `profile` are None if the run did not get so far.
    """

    trial: Trial | None
    tried: tuple[Tried, ...]
    chosen: int | None
    outcome: str
    reason: str
    curve: Curve | None
    summary: dict[str, Any] | None
    profile: dict[str, Any] | None
