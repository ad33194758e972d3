"""The demand of a zeroth-order method, and its beginning: the same for every estimator."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.descent import Descent, Sgd
from runtime.methods.zeroth.estimator import LANE_BYTES, Estimator, by_query
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.objectives.objective import grouped, objective_of
from runtime.plan.demand import Demand, lane_choices
from runtime.storage.activations import Activations

MOST_LANES = 16  # hidden states side by side, where they fit
# The relative error of a value that is rounded to bfloat16, in the root mean square: up to 2**-8,
# uniformly, and less the larger the value's mantissa
ROUNDED = 2**-8 / math.sqrt(3) * math.sqrt(0.75 / (2 * math.log(2)))
# The least change of products, as a share of that error. Measured on Gemma 3 270M at 32 tokens, a
# share of 2 gave differences of losses 3.9 times as large as their errors, one of 0.2 0.3 times.
LEAST_SHARE = 0.5
# On a GPU every value is rounded, not only factors: errors of differences between losses of tiny
# models were 1.8 to 2.6 times those of a CPU.
GPU_ERRORS = 2.0


def demand_of(config: StepConfig, estimator: Estimator, descent: type[Descent] = Sgd) -> Demand:
    """Needs a checkpoint for each hidden state, and a copy of a block's adapters for each point.

    The copies of a query are freed once its hidden states are done.
    """
    points = estimator.points
    of_query = max(map(len, by_query(points)))
    hidden_states = len(estimator.lanes(config.batch_size * config.grad_accumulation))
    noise = 0
    if config.trains_all:
        from runtime.methods.full.row_noise import noise_bytes  # other runs need it not

        noise = noise_bytes()
    return Demand(
        rows=config.batch_size,
        hidden_states=hidden_states,
        slots=1,
        lanes=lane_choices(min(MOST_LANES, hidden_states), fewest=2),
        adapter_copies=min(len(points), of_query * (2 + MOST_LANES // of_query)),
        scratch_copies=max(3, descent.scratch_copies),  # z, theta and their sum; or an update's
        trains_weights=config.trains_all,
        noise_bytes=noise,
        objects_bytes=(hidden_states - len(points)) * LANE_BYTES,
        shares=True,
    )


def start_with(
    config: TrainConfig,
    begin: Start,
    estimator: Estimator,
    descent: Descent | None = None,
) -> ZerothOrder:
    """The method of an estimator at its beginning.

    Without `descent`, it is plain SGD. A worker has slots for the hidden states of all, since it
    may become the fastest.

    Raises:
        UsageError: there are more workers than rows, or than points; or epsilon is too small for
            the type in which products are computed.
    """
    _check_resolved(config, begin)
    objective = objective_of(config.objective_name, begin.rows)
    rows, points = config.batch_size * config.grad_accumulation, len(estimator.points)
    groups = grouped(range(rows), objective.together)
    begin.workers.check(len(groups), points, objective.together)
    make: Callable[..., ZerothOrder] = ZerothOrder
    if config.trains_all:
        from runtime.methods.full.weights import FullWeights  # other runs need it not
        from runtime.methods.full.zeroth_order import FullZerothOrder

        assert isinstance(begin.weights, FullWeights), "these weights are only read"
        make = partial(FullZerothOrder, weights=begin.weights)
    return make(
        begin.models,
        begin.adapters,
        Activations(begin.scratch, 1, rows * points, begin.activation_shape),
        Noise(config.seed, config.noise_kind, config.pool),
        config.epsilon,
        estimator,
        config.weight_decay,
        descent or Sgd(),
        begin.plan.lanes,
        objective,
        begin.workers,
    )


def _check_resolved(config: TrainConfig, begin: Start) -> None:
    """Check that rounding to bfloat16 leaves something of the differences between losses.

    Adapters are float32, whatever products are computed in; their perturbations are lost where
    the values that they change are next rounded. With B = 0, as at the beginning, and A uniform
    with a variance of 1/(3 C), a perturbation changes y = x W^T + s (x A) B by s epsilon sqrt(r/3)
    times the size of x, which is about that of y. Rounding changes values by `ROUNDED` of their
    size, in each evaluation anew as soon as some differ.

    Raises:
        UsageError: the change is far below what rounding changes.
    """
    if begin.plan.compute_dtype == "float32":
        return
    lora, device = begin.adapters.manifest.lora, begin.adapters.manifest.device
    gain = 1.0 if lora.prefix else lora.scale * math.sqrt(lora.rank / 3)
    rounded = ROUNDED * (GPU_ERRORS if device == "gpu" else 1.0)
    least = LEAST_SHARE * rounded / gain
    if config.epsilon < least:
        raise UsageError(
            f"--epsilon {config.epsilon:g} with --compute-dtype bfloat16: it changes products by "
            f"about {gain * config.epsilon:.1g} of their size, and rounding changes them by "
            f"{rounded:.1g}, so differences of losses would be noise; give at least {least:.1g}, "
            "or --compute-dtype float32"
        )
