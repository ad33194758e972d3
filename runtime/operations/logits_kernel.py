"""The logits kernel: the scores of all tokens of the vocabulary, a tile of the matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import view
from runtime.arrays.matrices import Matrices
from runtime.arrays.stored import Matrix


@dataclass(frozen=True)
class LogitsKernel:
    """The `Logits` operation."""

    matrices: Matrices

    def run(self, h: mx.array, matrix: Matrix) -> npt.NDArray[np.float32]:
        """h W^T (V,) for one hidden state h (1, D)."""
        given = self.matrices.input(h, matrix)
        logits = np.empty(matrix.rows, np.float32)
        for start, stop in self.matrices.ranges(matrix):
            part = self.matrices.tile(matrix, start, stop).transposed_product(given)
            mx.eval(part)
            logits[start:stop] = view(part)[0]
            del part
        return logits
