"""The trials of a sweep: a method with one combination of the values to try, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ondevice.config.compare import CompareConfig


@dataclass(frozen=True)
class Trial:
    """A method with a value for each training option that its sweep is about."""

    method: str
    values: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of its run folder."""
        parts = [f"{option.replace('_', '-')}-{value!r}" for option, value in self.values.items()]
        return "-".join([self.method, *parts])

    def __str__(self) -> str:
        words = [f"{option.replace('_', ' ')} {value:g}" for option, value in self.values.items()]
        return ", ".join(words)


@dataclass(frozen=True)
class Tried:
    """How a trial ended: "finished", "diverged" or "over budget", or "rose" in a longer run.

    The losses are held-out ones, before and after its steps; None if they are not known.
    """

    trial: Trial
    outcome: str
    reason: str
    loss_before: float | None
    loss: float | None
    training_s: float | None


def grid(config: CompareConfig, method: str) -> list[Trial]:
    """Every combination of values that the sweep of `method` tries."""
    searched = config.searched(method)
    return [
        Trial(method, dict(zip(searched, values, strict=True)))
        for values in product(*searched.values())
    ]


def choose(tried: Sequence[Tried]) -> int | None:
    """The index of the finished trial with the lowest held-out loss; None if there is none."""
    losses = [
        math.inf if one.loss is None or one.outcome != "finished" else one.loss for one in tried
    ]
    best = min(losses)
    return losses.index(best) if math.isfinite(best) else None


def without(
    tried: tuple[Tried, ...], index: int, outcome: str = "", reason: str = ""
) -> tuple[Tried, ...]:
    """`tried` with another outcome for one of them, so that it is not chosen."""
    changed = replace(tried[index], outcome=outcome, reason=reason)
    return (*tried[:index], changed, *tried[index + 1 :])
