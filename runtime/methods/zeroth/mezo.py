"""Memory-efficient zeroth-order optimization (MeZO): two losses for each direction.

MeZO's Algorithms 1 and 2 (arXiv 2305.17333) are SPSA along noise z, over n directions:

    g_i = (loss(theta + eps z_i) - loss(theta - eps z_i)) / (2 eps)
    theta <- theta - rate (1/n) sum_i g_i z_i

Its other descents are those of `runtime.methods.zeroth.descent` and
`runtime.methods.zeroth.layer_scales`.

KZOO draws its directions uniformly from a pool of K: FedKSeed's finite pool of seeds (arXiv
2312.06353), with several directions a step as in MeBP's paper (appendix A). Without weight decay,
theta = theta_0 - sum_j a_j z_j, where a_j adds up rate g_i / n wherever j was drawn. FedKSeed-Pro,
which draws some seeds more often, is not here.

The references on the whole model are `MonolithicMeZO` and `MonolithicKZOO` of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.config.zeroth_order import SCALED
from runtime.core.errors import UsageError
from runtime.methods.protocol import Start
from runtime.methods.zeroth.descent import BY_NAME, Sgd, descent_of
from runtime.methods.zeroth.estimator import (
    MINUS,
    PLUS,
    Estimator,
    Losses,
    Point,
    projected_gradient,
)
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.layer_scales import ScaledDescent
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
    """See `demand_of`: two hidden states for each row and direction.

    Raises:
        UsageError: all parameters are to be trained, along averages or scaled directions.
    """
    descent = BY_NAME[config.zo_optimizer_name]
    if config.trains_all and descent is not Sgd:
        raise UsageError(
            f"--zo-optimizer {config.zo_optimizer} is not for --trainable full: every step would "
            "draw the noise of all parameters again for each estimate in its window; leave it out"
        )
    if config.trains_all and config.zo_scaling is not None:
        raise UsageError(
            f"--zo-scaling {config.zo_scaling} is not for --trainable full: its scales are those "
            "of layers' adapters; leave it out, or give --trainable lora"
        )
    if config.zo_scaling is not None:
        descent = ScaledDescent
    return demand_of(config, TwoPoint(config.directions), descent)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    descent = descent_of(config.zo_optimizer_name, config.zo_window_size)
    if config.zo_scaling is not None:
        scaled, interval = config.zo_scaled or SCALED[0], config.zo_scaling_interval or 0
        descent = ScaledDescent(config.zo_scaling, scaled, interval, begin.adapters.manifest)
    return start_with(config, begin, TwoPoint(config.directions), descent)
