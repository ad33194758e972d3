"""The cross entropy of the next token: the mean over all scored positions.

    loss = -log p(target | the tokens before it)

`runtime.operations.head_kernel` computes it and its gradient while it streams the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from runtime.engine.sample import NumberedRows, Sample
from runtime.objectives.objective import Group, Loss


class NextToken(Loss):
    """The cross entropy of the scored tokens."""

    def count(self, samples: Sequence[Sample]) -> int:
        return sum(len(sample.targets) for sample in samples)

    def value(self, group: Group) -> float:
        return sum(scored.cross_entropy for scored in group)

    def slopes(self, group: Group) -> list[float | mx.array]:
        return [1.0] * len(group)

    def shown(self, mean: float) -> dict[str, float]:
        """Nothing: it is the cross entropy."""
        return {}


def objective(rows: NumberedRows | None) -> NextToken:
    return NextToken()
