"""A loss that compares pairs of rows, as preferences do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from runtime.engine.sample import Sample
from runtime.objectives.objective import Group, Loss

BETA = 0.1


class PairLoss(Loss):
    """log(1 + exp(BETA * (chosen - rejected))) of the cross entropies of a pair of answers."""

    together = 2

    def count(self, samples: Sequence[Sample]) -> int:
        return len(samples) // 2

    def value(self, group: Group) -> float:
        return pair_loss(*(scored.cross_entropy for scored in group))

    def slopes(self, group: Group) -> list[float | mx.array]:
        chosen, rejected = group
        slope = pair_slope(chosen.cross_entropy, rejected.cross_entropy)
        return [slope, -slope]


def pair_loss(chosen: float, rejected: float) -> float:
    return math.log1p(math.exp(BETA * (chosen - rejected)))


def pair_slope(chosen: float, rejected: float) -> float:
    return BETA / (1 + math.exp(BETA * (rejected - chosen)))
