"""The protocol of methods: how one step turns rows into an update of the adapters.

A method sees a `Program`'s blocks, the adapters, and the rows of a step; it never sees files,
budgets or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.bundle.manifest import Block
from runtime.engine.executor import Gradients
from runtime.engine.program import Program


@dataclass(frozen=True)
class Row:
    """Tokens (n+1,): the first n are inputs, the last n targets, scored from `first` on."""

    tokens: npt.NDArray[Any]
    first: int

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        return self.tokens[:-1].astype(np.int64)

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        return self.tokens[1 + self.first :].astype(np.int64)

    @property
    def scored(self) -> slice:
        return slice(self.first, len(self.tokens) - 1)


@dataclass(frozen=True)
class StepLoss:
    """Summed loss over `tokens` scored positions, and how many were predicted right.

    `correct` is counted in evaluation only; training leaves it 0.
    """

    loss_sum: float
    correct: int
    tokens: int

    def __add__(self, other: StepLoss) -> StepLoss:
        return StepLoss(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    `loss` is that of the batch; `forward_passes` counts rows run forward for the objective (not
    recomputation); `skipped` says that nothing was learned because a loss was not finite, the
    `skipped`-th time in a row; `record` is what the trajectory log keeps of it.
    """

    loss: StepLoss
    forward_passes: int
    skipped: int = 0
    record: list[Any] | None = None


class Update(Protocol):
    """Takes a block's gradients (dA, dB per relative name) once they are complete."""

    def __call__(self, block: Block, gradients: Gradients) -> None: ...


Programs = Callable[[int], Program]  # of the smallest bucket that holds so many tokens


class Method(Protocol):
    """One way to train. Its state beside the adapters is what `write` writes and `read` reads."""

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Row]]) -> StepResult:
        """Step `number` (0-based) at learning rate `rate` over micro-batches of rows.

        The objective is the mean loss over all scored tokens of all parts.
        """
        ...

    def settle(self) -> None:
        """Bring the adapters to the state after the last step (before a save or evaluation)."""
        ...

    def write(self, path: Path) -> None: ...

    def read(self, path: Path) -> None: ...
