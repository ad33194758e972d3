"""LOZO: MeZO along directions of low rank, half of which stays for some steps.

Chen et al., *Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures*
(arXiv 2410.07698). For every matrix (m, n), U (m, r) is drawn in each step t, and V (n, r) for
every nu steps:

    c = (loss(theta + eps U V^T) - loss(theta - eps U V^T)) / (2 eps)
    theta <- theta - rate c U V^T / r

With several directions, the update is the mean of all. r is `--lozo-rank` and nu `--lozo-interval`.
A step's log holds c / r. The variant with momentum, LOZO-M, is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ondevice.config.shared import StepConfig
from ondevice.config.train import TrainConfig
from runtime.methods.estimator import Losses
from runtime.methods.forward_only import demand_of, start_with
from runtime.methods.mezo import TwoPoint
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth_order import ZerothOrder
from runtime.planner.demand import Demand


@dataclass
class OverRank(TwoPoint):
    """SPSA over the rank of the directions, whose values have that variance."""

    rank: int = 1

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple(c / self.rank for c in super().gradients(losses, epsilon))


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction; for adapters only."""
    return replace(demand_of(config, _estimator(config)), trains_weights=False)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    rank, interval = config.lozo_rank_used, config.lozo_interval_used
    noise = Noise(config.seed, config.noise_kind, rank=rank, interval=interval)
    return start_with(config, begin, _estimator(config), noise)


def _estimator(config: StepConfig) -> OverRank:
    return OverRank(config.directions, config.lozo_rank_used)
