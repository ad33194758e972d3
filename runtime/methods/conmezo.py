"""ConMeZO: MeZO along directions in a cone around a momentum.

Behric et al., *ConMeZO: Adaptive Descent-Direction Sampling for Gradient-Free Finetuning of Large
Language Models* (arXiv 2511.02757), Algorithm 1. m is the momentum, all zeros at first, u Gaussian
noise, d the number of trained values, a the angle of the cone and b the decay of the momentum:

    z = cos(a) sqrt(d) m / |m| + sin(a) u          (u while m is zero)
    g = (loss(theta + eps z) - loss(theta - eps z)) / (2 eps)
    theta <- theta - rate g z
    m <- b m + (1 - b) g z

With an angle of pi/2 it is MeZO. With several directions, all see the same m, and both updates take
the mean over them. a is `--cone-angle` and b `--cone-decay`; their defaults are those of the
authors' example for SST-2. The authors' code can also begin with wider cones (a warm-up), which is
not here.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.cone import ConeDescent
from runtime.methods.protocol import Start
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand
from runtime.storage.scratch import MappedTensors


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction; and m on the disk.

    Raises:
        UsageError: all parameters are to be trained.
    """
    if config.trains_all:
        raise UsageError(
            f"--trainable full is not for {config.method}: it keeps a float32 momentum for each "
            "trained value, which would be another copy of the model; give --method mezo, or "
            "--trainable lora"
        )
    return replace(
        demand_of(config, TwoPoint(config.directions)),
        moments=1,
        scratch_copies=ConeDescent.scratch_copies,
        trains_weights=False,
    )


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    shapes = Adapters.shapes(begin.adapters.manifest)
    on_disk = MappedTensors(begin.scratch, "momentum", shapes)
    angle, decay = config.cone_angle_used, config.cone_decay_used
    descent = ConeDescent(angle, decay, shapes, on_disk)
    return start_with(config, begin, TwoPoint(config.directions), descent=descent)
