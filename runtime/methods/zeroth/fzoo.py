"""FZOO: one loss for each direction, and a step measured in standard deviations of the losses.

The update of Dang et al., *FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language Models
towards Adam-Scale Speed* (arXiv 2506.09034), along N directions u_i of signs:

    l_i = loss(theta + eps u_i)       l_0 = loss(theta)
    G = 1/(eps N) sum_i (l_i - l_0) u_i
    sigma^2 = 1/(N-1) sum_i (l_i - mean of l_1 ... l_N)^2
    theta <- theta - rate G / sigma

A step's log holds (l_i - l_0) / (eps sigma), so a run is replayed as one of MeZO. Where all l_i are
equal, sigma is 0 and nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import PLUS, THETA, Estimator, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand


@dataclass(frozen=True)
class OneSided(Estimator):
    """Differences from the loss at theta, over the standard deviation of `queries` losses."""

    queries: int

    @property
    def points(self) -> Sequence[Point]:
        return [THETA, *self._perturbed]

    @property
    def compared(self) -> Sequence[tuple[Point, Point]]:
        return [(THETA, point) for point in self._perturbed]

    @property
    def _perturbed(self) -> list[Point]:
        return [Point(query, PLUS) for query in range(self.queries)]

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        perturbed = [losses[point] for point in self._perturbed]
        sigma = stdev(perturbed)
        if sigma == 0:
            return (0.0,) * len(perturbed)
        return tuple((loss - losses[THETA]) / (epsilon * sigma) for loss in perturbed)


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: a hidden state for each row and direction, and one at theta.

    Raises:
        UsageError: there are too few directions for a standard deviation.
    """
    if config.directions < 2:
        raise UsageError(
            f"--queries {config.directions} is too few for {config.method}: it divides by the "
            "standard deviation of the losses along the directions; give 2 or more (default: 8)"
        )
    return demand_of(config, OneSided(config.directions))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    return start_with(config, begin, OneSided(config.directions))
