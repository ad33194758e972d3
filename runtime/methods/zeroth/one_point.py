"""One loss for each direction, compared with that of the step before: residual feedback.

Definition 8 of MeZO's paper (appendix B.5), after Zhang et al., *A new one-point residual-feedback
oracle for black-box learning and control*:

    g_t = (loss(theta_t + eps z_t; B_t) - loss(theta_(t-1) + eps z_(t-1); B_(t-1))) / eps
    theta <- theta - rate g_t z_t

With several directions, each has its own residual, and the update is the mean of all. The first
step has no loss before it, so it learns nothing; a step that is skipped leaves the losses of the
step before it. The batches of two steps differ, so the estimates have a large variance: MeZO's
paper finds this much less efficient than two points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import PLUS, Estimator, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand


@dataclass
class Residual(Estimator):
    """Differences from the losses of the step before; `before` has one per query, or is empty."""

    queries: int = 1
    before: tuple[float, ...] = ()

    @property
    def points(self) -> Sequence[Point]:
        return [Point(query, PLUS) for query in range(self.queries)]

    @property
    def compared(self) -> Sequence[tuple[Point, Point]]:
        """Directions of one step, where there are several: their losses are of one batch."""
        first, *others = self.points
        return [(first, other) for other in others]

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        now = tuple(losses[point] for point in self.points)
        before, self.before = self.before or now, now
        return tuple((a - b) / epsilon for a, b in zip(now, before, strict=True))

    def state(self) -> dict[str, Any]:
        return {"before": list(self.before)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        before = tuple(map(float, facts["before"]))
        if len(before) not in (0, self.queries) or not all(map(math.isfinite, before)):
            raise ValueError(f"it holds the losses {before!r:.80}, of {self.queries} queries")
        self.before = before


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: one hidden state for each row and direction."""
    return demand_of(config, Residual(config.directions))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    return start_with(config, begin, Residual(config.directions))
