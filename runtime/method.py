"""The protocol of methods: how one step turns rows into an update of the adapters.

A method sees a `Program`'s blocks, the adapters, and the rows of a step; it never sees files,
budgets or models. What it learns for a block it hands to an `Update` as soon as it is complete,
so that gradients need not all be held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.manifest import Block
from runtime.program import Gradients


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


class Update(Protocol):
    """Takes a block's gradients (dA, dB per relative name) once they are complete."""

    def __call__(self, block: Block, gradients: Gradients) -> None: ...


class Method(Protocol):
    """One step over a micro-batch."""

    def step(self, rows: Sequence[Row], tokens: int, update: Update) -> StepLoss:
        """Compute the gradients of sum(loss) / `tokens` over `rows`, and hand them to `update`."""
        ...
