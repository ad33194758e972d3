"""HiZOO: MeZO along directions that are shorter where the loss is more curved.

Zhao et al., *Second-Order Fine-Tuning without Pain for LLMs: a Hessian Informed Zeroth-Order
Optimizer* (arXiv 2402.15173). S is an estimate of the Hessian's diagonal, one value for each
trained one, all ones at first (the paper's Sigma is 1 / S); z is Gaussian:

    d = z / sqrt(S)
    l+ = loss(theta + eps d)      l- = loss(theta - eps d)      l = loss(theta)
    g = (l+ - l-) / (2 eps)       h = (l+ + l- - 2 l) / (2 eps^2)
    S <- (1 - a) S + a |h| S z^2
    theta <- theta - rate g z / sqrt(S)

As in the authors' code, the last line takes the new S, and nothing is clipped. With several
directions, all see the old S, l is evaluated once, and both updates are the means over all. a is
`--hessian-smoothing`. A step's log holds every g and h, from which S is rebuilt too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import THETA, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.hessian import HessianDescent
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand
from runtime.storage.scratch import MappedTensors


@dataclass
class ThreePoint(TwoPoint):
    """SPSA, and with the loss at theta the second differences along the same directions."""

    @property
    def points(self) -> Sequence[Point]:
        return [THETA, *super().points]

    def extras(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple(
            (losses[plus] + losses[minus] - 2 * losses[THETA]) / (2 * epsilon * epsilon)
            for plus, minus in self.compared
        )


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction, and one; and S on the disk.

    Raises:
        UsageError: all parameters are to be trained.
    """
    if config.trains_all:
        raise UsageError(
            f"--trainable full is not for {config.method}: it keeps a float32 estimate of the "
            "curvature for each trained value, which would be another copy of the model; give "
            "--method mezo, or --trainable lora"
        )
    return replace(demand_of(config, ThreePoint(config.directions), HessianDescent), moments=1)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    shapes = Adapters.shapes(begin.adapters.manifest)
    on_disk = MappedTensors(begin.scratch, "hessian", shapes)
    descent = HessianDescent(config.hessian_smoothing_used, shapes, on_disk)
    return start_with(config, begin, ThreePoint(config.directions), descent=descent)
