"""Which evaluation of a run is the best, and for how long none has been better.

The evaluation before training counts too: training may only make a model worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from runtime.run.evaluation import Evaluation

Evaluations = Mapping[str, Evaluation]  # by "before", a step's number, or "after"


class Best(msgspec.Struct, frozen=True):
    """The lowest held-out loss of a run, and after how many steps it was measured."""

    step: int
    loss: float


def loss_of(evaluation: Evaluation) -> float:
    """The held-out loss; infinity where it is not finite."""
    return math.inf if evaluation.loss is None else evaluation.loss


def losses_by_step(evaluations: Evaluations, done: int) -> dict[int, float]:
    """The held-out losses up to step `done`, in order; infinity for those that are not finite."""
    ends = {"before": 0, "after": done}
    losses = {}
    for when, evaluation in evaluations.items():
        losses[ends[when] if when in ends else int(when)] = loss_of(evaluation)
    return {step: losses[step] for step in sorted(losses) if step <= done}


def best_of(evaluations: Evaluations, done: int) -> Best | None:
    """The lowest loss, the first of equals; None where no finite loss is known."""
    losses = losses_by_step(evaluations, done)
    step = min(losses, key=losses.__getitem__, default=0)
    return Best(step, losses[step]) if losses.get(step, math.inf) < math.inf else None


def no_better_since(evaluations: Evaluations, done: int, min_delta: float) -> int:
    """How many evaluations came after the last that was better by more than `min_delta`.

    The first evaluation is better than none.
    """
    lowest, since = math.inf, -1
    for loss in losses_by_step(evaluations, done).values():
        since += 1
        if since == 0 or loss < lowest - min_delta:
            lowest, since = loss, 0
    return max(since, 0)
