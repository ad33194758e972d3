"""LOZO: MeZO along directions of low rank, half of which stays for some steps.

Chen et al., *Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures*
(arXiv 2410.07698). For every matrix (m, n), U (m, r) is drawn in each step t, and V (n, r) for
every nu steps:

    c = (loss(theta + eps U V^T) - loss(theta - eps U V^T)) / (2 eps)
    theta <- theta - rate c U V^T / r

With several directions, the update is the mean of all. r is `--lozo-rank` and nu `--lozo-interval`.
A step's log holds c / r. `--lozo-momentum` follows a momentum instead, the paper's LOZO-M: see
`runtime.methods.factor_momentum`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.factor_momentum import FactorDescent
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import Losses
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand
from runtime.storage.scratch import MappedTensors


@dataclass
class OverRank(TwoPoint):
    """SPSA over the rank of the directions, whose values have that variance."""

    rank: int = 1

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple(c / self.rank for c in super().gradients(losses, epsilon))


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction; for adapters only.

    With momentum its factors are on the disk; they take less than the adapters, which are counted.

    Raises:
        UsageError: several directions, each with factors of its own, would share a momentum.
    """
    found = replace(demand_of(config, _estimator(config)), trains_weights=False)
    if config.lozo_momentum is None:
        return found
    if config.directions != 1:
        raise UsageError(
            f"--lozo-momentum is for one direction a step, not for --queries {config.directions}: "
            "each has a V of its own; leave one of them out"
        )
    return replace(found, moments=1, scratch_copies=FactorDescent.scratch_copies)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning.

    Raises:
        UsageError: the momentum's rank is larger than that of the adapters.
    """
    rank, interval = config.lozo_rank_used, config.lozo_interval_used
    noise = Noise(config.seed, config.noise_kind, rank=rank, interval=interval)
    descent = None
    if config.lozo_momentum is not None:
        manifest = begin.adapters.manifest
        shapes = Adapters.shapes(manifest)
        least = min(min(shape) for shape in shapes.values())
        if rank > least:
            what = "the rows of the prefix" if manifest.lora.prefix else "the adapters' rank"
            raise UsageError(
                f"--lozo-rank {rank} with --lozo-momentum is more than {what}, {least}; give that "
                "or less"
            )
        factors = FactorDescent.factors_of(shapes, rank)
        on_disk = MappedTensors(begin.scratch, "momentum", factors)
        descent = FactorDescent(config.lozo_momentum, rank, shapes, on_disk)
    return start_with(config, begin, _estimator(config), noise, descent)


def _estimator(config: StepConfig) -> OverRank:
    return OverRank(config.directions, config.lozo_rank_used)
