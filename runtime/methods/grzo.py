"""GRZO: MeZO with a direction of its own for each row of a batch, weighed within the batch.

Tan et al., *GRZO: Group-Relative Zeroth-Order Optimization for Large Language Model Fine-Tuning*
(arXiv 2606.02857). With B rows, U the noise of the step, shared by all of them, and r_i and s_i
signs (-1 or 1) of each row, one for every row and every column of a matrix (Flipout):

    z_i = U * (r_i s_i^T)                                 element by element
    delta_i = loss(theta + eps z_i; row i) - loss(theta - eps z_i; row i)
    a_i = delta_i / (s + zeta),  s the standard deviation of the delta (over B, not B - 1)
    theta <- theta - rate 1/(2 eps B) sum_i a_i z_i

So a step sees as many directions as rows, for the forward passes of MeZO with one. A row's loss is
the mean over its own scored tokens. zeta is 1e-8. Where all delta are equal, s is 0 and the step
learns nothing; this includes a step of a single row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import pstdev

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.estimator import MINUS, PLUS, Lane, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand

ZETA = 1e-8


@dataclass
class GroupRelative(TwoPoint):
    """SPSA of each row along its own direction, over the deviation of the rows' differences.

    `queries` is the most rows of a step; its last batch may have fewer.
    """

    def lanes(self, rows: int) -> list[Lane]:
        return [Lane(Point(row, sign), row) for row in range(rows) for sign in (PLUS, MINUS)]

    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        pairs = [(plus, minus) for plus, minus in self.compared if plus in losses]
        delta = [losses[plus] - losses[minus] for plus, minus in pairs]
        deviation = pstdev(delta)
        if deviation == 0:
            return (0.0,) * len(delta)
        return tuple(one / (deviation + ZETA) / (2 * epsilon) for one in delta)


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row; for adapters only.

    Raises:
        UsageError: there are too few rows for a standard deviation.
    """
    if _rows(config) < 2:
        raise UsageError(
            f"--batch-size {config.batch_size} is too small for {config.method}: it divides by the "
            "standard deviation over the rows of a step; give 2 or more"
        )
    return replace(demand_of(config, GroupRelative(_rows(config))), trains_weights=False)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    noise = Noise(config.seed, config.noise_kind, flipout=True)
    return start_with(config, begin, GroupRelative(_rows(config)), noise)


def _rows(config: StepConfig) -> int:
    return config.batch_size * config.grad_accumulation
