"""The levels of a comparison: held-out losses, whose cost it reports for each method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.compare.curve import Curve

SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the way from the baseline to the goal


@dataclass(frozen=True)
class Level:
    """A held-out loss, and why it is a level."""

    loss: float
    meaning: str


def levels(baseline: float, curves: Mapping[str, Curve], target: float = 0.0) -> list[Level]:
    """Levels between the loss before training and the goal, and each method's best, downwards.

    The goal is `target` where it is given and lies below the baseline, else the best loss that
    any method reached; there are no levels where no loss fell below the baseline.
    """
    bests = {name: curve.best.loss for name, curve in curves.items() if curve.points}
    goal = target or min(bests.values(), default=baseline)
    meanings: dict[float, list[str]] = {}
    if goal < baseline:
        for share in SHARES:
            loss = goal if share == 1 else baseline - share * (baseline - goal)
            name = "the target" if target and share == 1 else f"{share:.0%} of the way"
            meanings.setdefault(loss, []).append(name)
    for name, best in bests.items():
        if best < baseline:
            meanings.setdefault(best, []).append(f"best of {name}")
    return [Level(loss, ", ".join(meanings[loss])) for loss in sorted(meanings, reverse=True)]
