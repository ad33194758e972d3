"""Memory-efficient zeroth-order optimization (MeZO): two losses for each direction.

MeZO's Algorithms 1 and 2 (arXiv 2305.17333) are SPSA along noise z, over n directions:

    g_i = (loss(theta + eps z_i) - loss(theta - eps z_i)) / (2 eps)
    theta <- theta - rate (1/n) sum_i g_i z_i

The reference on the whole model is `harness.peers.whole_model.MonolithicMeZO`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import MINUS, PLUS, Estimator, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.scalar_update import projected_gradient
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand


@dataclass
class TwoPoint(Estimator):
    """SPSA: the projected gradient along each of `queries` directions."""

    queries: int = 1

    @property
    def points(self) -> Sequence[Point]:
        return [Point(query, sign) for query in range(self.queries) for sign in (PLUS, MINUS)]

    @property
    def compared(self) -> Sequence[tuple[Point, Point]]:
        return [(Point(query, PLUS), Point(query, MINUS)) for query in range(self.queries)]

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple(
            projected_gradient(losses[plus], losses[minus], epsilon)
            for plus, minus in self.compared
        )


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction."""
    return demand_of(config, TwoPoint(config.directions))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    return start_with(config, begin, TwoPoint(config.directions))
