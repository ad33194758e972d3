"""The share of rows of which every scored token is the most likely.

Greedy generation would give exactly their answers, but nothing is generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.engine.sample import NumberedRows, Sample, first_scored
from runtime.objectives.objective import Scored, Share


class ExactMatch(Share):
    """Minus the share of rows of which every scored token is the most likely."""

    predicts = True

    def count(self, samples: Sequence[Sample]) -> int:
        return sum(len(sample.rows) for sample in samples)

    def right(self, sample: Scored) -> int:
        rows = np.logical_and.reduceat(sample.right, first_scored(sample.sample))
        return int(np.count_nonzero(rows))


def objective(rows: NumberedRows | None) -> ExactMatch:
    return ExactMatch()
