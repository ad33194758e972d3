"""What a zeroth-order method lowers: the loss, or minus a share of right answers.

Such a method needs no gradient, so what it lowers need not have one (MeZO, section 3.3): the share
of tokens that are the most likely, of rows whose scored tokens all are (an exact match, without
generating anything), or of rows whose label is the most likely of all labels. Shares of a small
batch change by steps, so that many perturbations change nothing; larger batches change more often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.values import Loras
from runtime.core.errors import DataError
from runtime.engine.model import Model
from runtime.engine.sample import NumberedRows, Sample
from runtime.operations.head_kernel import HeadResult

Ids = npt.NDArray[np.int64]
MOST_LABELS = 256


@dataclass(frozen=True)
class Scored:
    """What is known of a sample at one point: the head's input h (N, D) and its results."""

    model: Model
    sample: Sample
    h: mx.array
    result: HeadResult
    loras: Loras


class Objective(ABC):
    """A sum over the samples of a batch, divided by a count; it is lowered."""

    predicts: ClassVar[bool] = True  # whether it needs the most likely tokens

    @abstractmethod
    def count(self, sample: Sample) -> int:
        """How much of the divisor a sample brings."""

    @abstractmethod
    def value(self, scored: Scored) -> float:
        """What a sample adds to the sum."""


class MeanLoss(Objective):
    """The cross entropy of the scored tokens."""

    predicts = False

    def count(self, sample: Sample) -> int:
        return len(sample.targets)

    def value(self, scored: Scored) -> float:
        return float(scored.result.loss.sum().item())  # type: ignore[arg-type]


class Accuracy(Objective):
    """Minus the share of scored tokens that are the most likely."""

    def count(self, sample: Sample) -> int:
        return len(sample.targets)

    def value(self, scored: Scored) -> float:
        return -float(np.count_nonzero(_right(scored)))


class ExactMatch(Objective):
    """Minus the share of rows of which every scored token is the most likely."""

    def count(self, sample: Sample) -> int:
        return len(sample.rows)

    def value(self, scored: Scored) -> float:
        firsts = _firsts(scored.sample)
        return -float(np.logical_and.reduceat(_right(scored), firsts).sum())


@dataclass(frozen=True)
class LabelAccuracy(Objective):
    """Minus the share of rows whose label is the most likely of all labels.

    A row's label is its first scored token. The other tokens of the vocabulary do not compete.
    """

    labels: Ids
    predicts = False

    def count(self, sample: Sample) -> int:
        return len(sample.rows)

    def value(self, scored: Scored) -> float:
        firsts = _firsts(scored.sample)
        best = best_labels(scored.model, scored.h[mx.array(firsts)], self.labels, scored.loras)
        return -float(np.count_nonzero(best == scored.sample.targets[firsts]))


def best_labels(model: Model, h: mx.array, labels: Ids, loras: Loras) -> Ids:
    """Of the tokens `labels` (K,) the most likely one at each hidden state h (N, D), as (N,)."""
    found: Ids = labels[np.array(model.label_logits(h, labels, loras).argmax(axis=-1))]
    return found


def _right(scored: Scored) -> npt.NDArray[np.bool_]:
    predicted = scored.result.predicted
    assert predicted is not None, "the most likely tokens were not asked for"
    return np.asarray(np.array(predicted) == scored.sample.targets)


def _firsts(sample: Sample) -> Ids:
    """Where each row's first scored token is among those of the sample."""
    counts = [len(row.scored) for row in sample.rows]
    return np.cumsum([0, *counts[:-1]])


def objective_of(name: str, rows: NumberedRows) -> Objective:
    """The objective of a name, one of OBJECTIVES, over the rows of a training.

    Raises:
        DataError: there are no labels to choose from, or too many to be labels.
    """
    if name == "labels":
        return LabelAccuracy(labels_of(rows, "--objective labels", "training rows"))
    found: dict[str, Callable[[], Objective]] = {
        "loss": MeanLoss,
        "accuracy": Accuracy,
        "exact": ExactMatch,
    }
    return found[name]()


def labels_of(rows: NumberedRows, asked: str, what: str) -> Ids:
    """The distinct first scored tokens of all rows, ascending.

    `asked` is the option that wants labels, and `what` the rows, as messages name them.

    Raises:
        DataError: there is one only, or there are more than MOST_LABELS.
    """
    found: set[int] = set()
    for index in range(len(rows)):
        tokens, positions = rows.row(index)
        found.add(int(tokens[1 + positions[0]]))
        if len(found) > MOST_LABELS:
            raise DataError(
                f"{asked}: the answers of the first {index + 1:,} {what} begin with {len(found)} "
                f"different tokens, which are too many to be labels (at most {MOST_LABELS}); give "
                f"{asked.split()[0]} exact, or rows whose answers are labels"
            )
    if len(found) < 2:
        raise DataError(
            f"{asked}: the answers of all {what} begin with the same token, so that there is "
            "nothing to tell apart; labels must differ in their first token"
        )
    return np.array(sorted(found), np.int64)


def shares(objective: Objective, values: Sequence[float]) -> float | None:
    """The mean share of right answers at all points; None where the objective is the loss."""
    if isinstance(objective, MeanLoss):
        return None
    return -sum(values) / len(values)
