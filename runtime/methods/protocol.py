"""The interface of training methods, and how one is found by its name.

A method sees the blocks of a model, the adapters, and the rows of a step; it never sees budgets or
architectures. It declares what it needs (`runtime.plan.demand`) before anything is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients
from runtime.arrays.weight_source import WeightSource
from runtime.config.methods import METHODS
from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.engine.model import Model
from runtime.engine.sample import NumberedRows, Sample
from runtime.methods.adapters import Adapters
from runtime.parallel.workers import Workers
from runtime.plan.demand import Demand
from runtime.plan.plan import Plan


@dataclass(frozen=True)
class StepLoss:
    """Summed cross entropy over `scored_tokens` positions, and how many were predicted right.

    `correct` is counted in evaluation only; training leaves it 0. `objective_sum` is the
    sum that backpropagation has followed, before it is divided.
    """

    loss_sum: float
    correct: int
    scored_tokens: int
    objective_sum: float = 0.0

    def __add__(self, other: StepLoss) -> StepLoss:
        return StepLoss(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.scored_tokens + other.scored_tokens,
            self.objective_sum + other.objective_sum,
        )


@dataclass(frozen=True)
class StepResult:
    """The loss of a step, its cost, and its line in the log.

    `loss` is that of the batch; `forward_passes` counts samples run forward for the objective (not
    recomputation); `skipped` is above 0 if nothing was learned because a loss was not finite, and
    counts such steps in a row; `record` is the step's line in the trajectory log; `gradient_norm`
    is that of all gradients before they were clipped, None where none are; `shown` are
    further figures for the metrics, such as the share of right answers that is raised.
    """

    loss: StepLoss
    forward_passes: int
    skipped: int = 0
    record: list[Any] | None = None
    gradient_norm: float | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)


ApplyGradients = Callable[[Block, Gradients], None]
"""Takes a block's gradients (dA, dB per relative name) once they are complete."""
Models = Callable[[int], Model]  # of the smallest sequence bucket that holds so many tokens


TRAJECTORY = "trajectory.jsonl"
"""The log, in a run's folder, of a method that keeps one."""


class Method(Protocol):
    """One way to train; `write` and `read` save and restore its state besides the adapters.

    `keeps_log` says whether the run writes a log from which it can be rebuilt. Its first line is
    `log_header`, read before the first step, and each step's line is `StepResult.record`. `whole`
    says whether the state is that before the step whenever workers exchange in it, so that it can
    be saved if one of them is lost.
    """

    @property
    def keeps_log(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """Step `number` (0-based) at learning rate `rate` over micro-batches of samples.

        The objective is the mean over all parts together.
        """
        ...

    def settle(self) -> None:
        """Bring the adapters to the state after the last step (before a save or evaluation)."""
        ...

    def digest(self) -> str:
        """A SHA-256 of what is trained, by which workers compare it; equal only where it is."""
        ...

    def write(self, path: Path) -> None: ...

    def read(self, path: Path) -> None: ...

    def log_header(self) -> str: ...


@dataclass(frozen=True)
class Start:
    """A planned model, adapters, and a folder for scratch files, with which a method starts.

    `weights` are those that the models read; a method of all parameters also trains them, and has
    no adapters. `rows` are the training data. `fresh` says that no save is read after this. A
    method whose first adapters follow from more than the seed gives them to `write_first`, so that
    `ondevice replay` finds them. `workers` share out every step, and all have all of its rows.
    """

    models: Models
    plan: Plan
    adapters: Adapters
    scratch: Path
    weights: WeightSource
    rows: NumberedRows | None = None
    fresh: bool = True
    write_first: Callable[[Adapters], None] | None = None
    workers: Workers = field(default_factory=Workers)

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """The shape of the largest activation checkpoint: (1, T, D)."""
        return 1, self.plan.bucket, self.adapters.manifest.widest


class Implementation(Protocol):
    """The functions that the module of a method must define."""

    def demand(self, config: StepConfig) -> Demand:
        """The demand of this configuration of training, for the planner."""
        ...

    def start(self, config: TrainConfig, begin: Start) -> Method:
        """The method at its beginning."""
        ...


def method(name: str) -> Implementation:
    """The module of a method that `runtime.config.methods` lists."""
    return cast(Implementation, import_module(METHODS[name].module))


def started(config: TrainConfig, begin: Start) -> Method:
    """The method of a configuration at its beginning.

    Raises:
        UsageError: there are several workers, and they cannot share its steps.
    """
    implementation, size = method(config.method), begin.workers.exchange.size
    demand = implementation.demand(config)
    if size > 1 and not demand.shares:
        raise UsageError(
            f"{size} workers are there, and a step of {config.method} cannot be shared out; start "
            "one process, or give --method mebp, mezo or another that can"
        )
    running = implementation.start(config, begin)
    if begin.workers.fleet is not None and (demand.trains_weights or not running.keeps_log):
        of = "--trainable full" if demand.trains_weights else f"--method {config.method}"
        raise UsageError(
            f"{of} cannot be trained with workers that come and go: they follow a run by the few "
            "numbers of each step; train adapters by --method mezo, or another that sees losses "
            "only, or share it by mpirun (--parallel data=2)"
        )
    return running


def passes_before(config: StepConfig, rows: int | None) -> int:
    """The forward passes that a method makes before its first step, at most.

    `rows` are those of the training data, None where there are more than any method needs. Only the
    module of a method that makes such passes defines `first_passes`.
    """
    counted = getattr(method(config.method), "first_passes", None)
    return 0 if counted is None else int(counted(config, rows))
