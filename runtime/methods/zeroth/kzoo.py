"""KZOO: MeZO whose directions come from a pool of K, so that K numbers describe the adapters.

FedKSeed's finite pool of seeds (Qin et al., arXiv 2312.06353), with several directions a step as
in MeBP's paper (appendix A), where this is called KZOO:

    j_i drawn uniformly from 1 ... K
    g_i = (loss(theta + eps z_j_i) - loss(theta - eps z_j_i)) / (2 eps)
    theta <- theta - rate (1/n) sum_i g_i z_j_i

Without weight decay, theta = theta_0 - sum_j a_j z_j, where a_j adds up rate g_i / n of all steps
and directions with j_i = j. FedKSeed-Pro, which draws some seeds more often, is not here.
"""

from __future__ import annotations

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.config.zeroth_order import USUAL_POOL
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction."""
    return demand_of(config, TwoPoint(config.directions))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    noise = Noise(config.seed, config.noise_kind, config.seed_pool or USUAL_POOL)
    return start_with(config, begin, TwoPoint(config.directions), noise)
