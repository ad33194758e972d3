"""ZO-Muon: estimates of the gradient in a random subspace, orthogonalized as by Muon.

Lang et al., *Powering Up Zeroth-Order Training via Subspace Gradient Orthogonalization* (arXiv
2602.17155). For each matrix (M, N), P (M, k) has orthonormal columns, and is drawn anew after every
`interval` steps; Psi_i (k, N) is the noise of n directions:

    g_i = (loss(theta + eps P Psi_i) - loss(theta)) / eps
    theta <- theta - rate P msign((1/n) sum_i g_i Psi_i)

msign is in `runtime.methods.muon`. k is the rank, or M or N where that is less. P is the Q of a QR
decomposition of noise, the same for all directions of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.methods.muon import MuonDescent
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import PLUS, THETA, Estimator, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand


@dataclass(frozen=True)
class FromTheta(Estimator):
    """Differences from the loss at theta along `queries` directions."""

    queries: int

    @property
    def points(self) -> Sequence[Point]:
        return [THETA, *(Point(query, PLUS) for query in range(self.queries))]

    @property
    def compared(self) -> Sequence[tuple[Point, Point]]:
        return [(THETA, point) for point in self.points[1:]]

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple((losses[point] - losses[THETA]) / epsilon for _, point in self.compared)


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: a hidden state for each row and direction, and one at theta."""
    return replace(
        demand_of(config, FromTheta(config.directions)),
        scratch_copies=MuonDescent.scratch_copies,
        trains_weights=False,
    )


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    rank, interval = config.muon_rank_used, config.muon_interval_used
    noise = Noise(config.seed, config.noise_kind, rank=rank, interval=interval, orthonormal=True)
    return start_with(config, begin, FromTheta(config.directions), noise, MuonDescent())
