"""The share of rows whose label is the most likely of all labels.

A row's label is its first scored token. The other tokens of the vocabulary do not compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.core.errors import DataError
from runtime.engine.sample import NumberedRows, Sample, first_scored
from runtime.objectives.objective import Scored, Share

Ids = npt.NDArray[np.int64]
MOST_LABELS = 256


@dataclass
class LabelAccuracy(Share):
    """Minus the share of rows whose label is the most likely of `labels` (K,)."""

    labels: Ids

    def count(self, samples: Sequence[Sample]) -> int:
        return sum(len(sample.rows) for sample in samples)

    def right(self, sample: Scored) -> int:
        expected, answered = self.answers(sample)
        return int(np.count_nonzero(expected == answered))

    def answers(self, sample: Scored) -> tuple[Ids, Ids]:
        """The label of each row of a sample, and the most likely one."""
        firsts = first_scored(sample.sample)
        h = sample.h[mx.array(firsts)]  # (rows, D)
        logits = sample.model.label_logits(h, self.labels, sample.loras)
        return sample.sample.targets[firsts], self.labels[np.array(logits.argmax(axis=-1))]


def objective(rows: NumberedRows | None) -> LabelAccuracy:
    """The labels of the training rows.

    Raises:
        DataError: see `labels_of`.
    """
    assert rows is not None, "an objective over labels needs the rows"
    return LabelAccuracy(labels_of(rows, "--objective labels", "training rows"))


def labels_of(rows: NumberedRows, asked: str, rows_name: str) -> Ids:
    """The distinct first scored tokens of all rows, ascending.

    `asked` is the option that wants labels, and `rows_name` the rows, as messages call them.

    Raises:
        DataError: there is one only, or there are more than MOST_LABELS.
    """
    labels: set[int] = set()
    for index in range(len(rows)):
        tokens, positions = rows.row(index)
        labels.add(int(tokens[1 + positions[0]]))
        if len(labels) > MOST_LABELS:
            raise DataError(
                f"{asked}: the answers of the first {index + 1:,} {rows_name} begin with "
                f"{len(labels)} different tokens, which are too many to be labels (at most "
                f"{MOST_LABELS}); give {asked.split()[0]} exact, or rows whose answers are labels"
            )
    if len(labels) < 2:
        raise DataError(
            f"{asked}: the answers of all {rows_name} begin with the same token, so that there is "
            "nothing to tell apart; labels must differ in their first token"
        )
    return np.array(sorted(labels), np.int64)
