"""MEAZO: MeZO with Adam's second moment of one number, the mean projected gradient.

Dbouk et al., *On Adaptivity in Zeroth-Order Optimization* (arXiv 2605.03869), with q directions:

    g_i = (loss(theta + eps z_i) - loss(theta - eps z_i)) / (2 eps)
    g = 1/q sum_i g_i
    v <- beta v + (1 - beta) g^2,  v^ = v / (1 - beta^t) in the t-th update, as in Adam
    theta <- theta - rate / (sqrt(v^) + zeta) (1/q) sum_i g_i z_i

beta and zeta are Adam's, 0.999 and 1e-8. A step's log holds g_i / (sqrt(v^) + zeta), so a run is
replayed as one of MeZO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import Losses
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand

BETA, ZETA = 0.999, 1e-8


@dataclass
class Normalized(TwoPoint):
    """SPSA over the root of `v`, the average of its squares in `updates` steps."""

    v: float = 0.0
    updates: int = 0

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        found = super().gradients(losses, epsilon)
        self.updates += 1
        self.v = BETA * self.v + (1 - BETA) * (sum(found) / len(found)) ** 2
        corrected = self.v / (1 - BETA**self.updates)
        return tuple(g / (math.sqrt(corrected) + ZETA) for g in found)

    def state(self) -> dict[str, Any]:
        return {"v": self.v, "updates": self.updates}

    def restore(self, facts: Mapping[str, Any]) -> None:
        v, updates = float(facts["v"]), int(facts["updates"])
        if not 0 <= v < math.inf or updates < 0:
            raise ValueError(f"its second moment is {v} after {updates} updates")
        self.v, self.updates = v, updates


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction."""
    return demand_of(config, Normalized(config.directions))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    return start_with(config, begin, Normalized(config.directions))
