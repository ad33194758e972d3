"""The interface of objectives, and how one is found by its name.

An objective leads from hidden states at scored positions to a number that is lowered. It is a sum
over the groups of a batch, divided by a count. A group is a row, or several rows that belong
together, such as the two answers of a preference. A loss also has a gradient, which
backpropagation follows; zeroth-order methods need none (MeZO, section 3.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import ClassVar, Protocol, TypeVar, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.values import Loras
from runtime.config.methods import OBJECTIVES
from runtime.core.errors import UsageError
from runtime.engine.model import Model
from runtime.engine.sample import NumberedRows, Sample
from runtime.operations.head_kernel import HeadResult

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """A sample at the head: its hidden states h (N, D) at the N scored positions, and their losses.

    `head` holds the cross entropy of each position, its gradient, and the most likely tokens, the
    latter two where they were asked for. `loras` move the head's own weights.
    """

    model: Model
    sample: Sample
    h: mx.array
    head: HeadResult
    loras: Loras

    @cached_property
    def cross_entropy(self) -> float:
        """Summed over the scored positions."""
        return float(self.head.loss.sum().item())  # type: ignore[arg-type]

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each target (N,) is the most likely token."""
        assert self.head.predicted is not None, "the most likely tokens were not asked for"
        return np.asarray(np.array(self.head.predicted) == self.sample.targets)

    @property
    def gradient(self) -> mx.array:
        """The gradient (N, D) of the summed cross entropy with respect to h."""
        assert self.head.dh is not None, "the gradient was not asked for"
        return self.head.dh


Group = Sequence[Scored]
"""Samples that an objective sees together: `Objective.together` neighbours of a batch."""


class Objective(ABC):
    """A sum over the groups of a batch, divided by a count; it is lowered."""

    together: ClassVar[int] = 1  # samples of a group
    predicts: ClassVar[bool] = False  # whether it needs the most likely tokens

    @abstractmethod
    def count(self, samples: Sequence[Sample]) -> int:
        """How much of the divisor whole groups bring."""

    @abstractmethod
    def value(self, group: Group) -> float:
        """The summand of a group."""

    @abstractmethod
    def shown(self, mean: float) -> dict[str, float]:
        """The objective's mean by the name that metrics give it, beside the cross entropy."""


class Loss(Objective):
    """An objective with a gradient."""

    @abstractmethod
    def slopes(self, group: Group) -> list[float | mx.array]:
        """The slope of `value` over each sample's cross entropies: one, or (N, 1) for N of them."""

    def shown(self, mean: float) -> dict[str, float]:
        return {"trained_loss": mean}


class Share(Objective):
    """Minus a share of right answers, which have no gradient.

    Shares of a small batch change by steps, so that many perturbations change nothing; larger
    batches change more often.
    """

    @abstractmethod
    def right(self, sample: Scored) -> int:
        """How many answers of a sample are right."""

    def value(self, group: Group) -> float:
        return -float(sum(map(self.right, group)))

    def shown(self, mean: float) -> dict[str, float]:
        return {"objective": -mean}


class Implementation(Protocol):
    """The functions that the module of an objective must define."""

    def objective(self, rows: NumberedRows | None) -> Objective:
        """The objective of a training on `rows`; None where none are known."""
        ...


def grouped(items: Sequence[T], together: int) -> list[Sequence[T]]:
    """So many neighbours at a time; the last ones may be fewer."""
    return [items[at : at + together] for at in range(0, len(items), together)]


def chunks(groups: Sequence[T], most: int, size: Callable[[T], int]) -> list[list[T]]:
    """Neighbouring groups that are scored in one pass: their sizes add up to at most `most`.

    A larger group is alone.
    """
    passes: list[list[T]] = []
    room = 0
    for group in groups:
        if not passes or size(group) > room:
            passes.append([])
            room = most
        passes[-1].append(group)
        room -= size(group)
    return passes


def score(
    model: Model,
    samples: Sequence[Sample],
    hs: Sequence[mx.array],
    *,
    gradient: bool = False,
    predictions: bool = False,
    loras: Sequence[Loras] | None = None,
) -> list[Scored]:
    """The samples at the head, in one pass over the vocabulary, from hidden states h (N, D).

    `gradient` and `predictions` ask for values that `Scored` has only then.
    """
    loras = [{}] * len(hs) if loras is None else loras
    targets = [sample.targets for sample in samples]
    heads = model.losses(hs, targets, gradient, predictions, loras)
    return [
        Scored(model, sample, h, head, own)
        for sample, h, head, own in zip(samples, hs, heads, loras, strict=True)
    ]


def objective_of(name: str, rows: NumberedRows | None) -> Objective:
    """The objective that `runtime.config.methods` lists under a name, for a training on `rows`.

    Raises:
        DataError: it cannot be one of these rows.
    """
    return cast(Implementation, import_module(OBJECTIVES[name].module)).objective(rows)


def loss_of(name: str, rows: NumberedRows | None, method: str) -> Loss:
    """As `objective_of`, for a method that follows gradients.

    Raises:
        UsageError: the objective has none.
    """
    objective = objective_of(name, rows)
    if not isinstance(objective, Loss):
        raise UsageError(
            f"--objective {name} has no gradient, which {method} follows; give a method that needs "
            "none, such as --method mezo, or --objective loss"
        )
    return objective
