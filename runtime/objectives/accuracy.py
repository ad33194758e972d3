"""The share of scored tokens that are the most likely."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.engine.sample import NumberedRows, Sample
from runtime.objectives.objective import Scored, Share


class Accuracy(Share):
    """Minus the share of scored tokens that are the most likely."""

    predicts = True

    def count(self, samples: Sequence[Sample]) -> int:
        return sum(len(sample.targets) for sample in samples)

    def right(self, sample: Scored) -> int:
        return int(np.count_nonzero(sample.right))


def objective(rows: NumberedRows | None) -> Accuracy:
    return Accuracy()
