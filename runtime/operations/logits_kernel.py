"""The logits kernel: the scores of all tokens of the vocabulary, a tile of the matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, view
from runtime.arrays.matrices import Matrices
from runtime.arrays.stored import Matrix


@dataclass(frozen=True)
class Shaping:
    """What a head makes of the products h W^T: it adds a bias (V,), and caps them, or neither."""

    bias: mx.array | None = None
    cap: float | None = None

    def of_tile(self, products: mx.array, start: int, arrays: Arrays) -> mx.array:
        """The logits (N, R) of products with the rows from `start` on, which are consumed."""
        stop = start + products.shape[1]
        return self._shaped(products, None if self.bias is None else self.bias[start:stop], arrays)

    def of_rows(self, products: mx.array, rows: npt.NDArray[np.int64], arrays: Arrays) -> mx.array:
        """The logits of products (..., K) with chosen rows (K,), which are consumed."""
        chosen = None if self.bias is None else mx.take(self.bias, mx.array(rows.astype(np.int32)))
        return self._shaped(products, chosen, arrays)

    def _shaped(self, products: mx.array, bias: mx.array | None, arrays: Arrays) -> mx.array:
        if bias is not None:
            products = products + bias
        if self.cap is None:
            return products
        arrays.settle(products)
        return arrays.capped(products, self.cap)

    def slope(self, logits: mx.array, arrays: Arrays) -> mx.array | None:
        """The slope of the logits over the products; None where it is 1."""
        return None if self.cap is None else arrays.cap_slope(logits, self.cap)


@dataclass(frozen=True)
class LogitsKernel:
    """The `Logits` operation."""

    matrices: Matrices

    def run(
        self, h: mx.array, matrix: Matrix, shaping: Shaping | None = None
    ) -> npt.NDArray[np.float32]:
        """The logits (V,) of one hidden state h (1, D)."""
        shaping = shaping or Shaping()
        whole = self.matrices.of_row(h, matrix)
        if whole is not None:
            shaped = shaping.of_tile(whole, 0, self.matrices.arrays)
            return view(shaped).reshape(matrix.rows)
        given = self.matrices.input(h)
        logits = np.empty(matrix.rows, np.float32)
        for start, stop in self.matrices.ranges(matrix):
            part = self.matrices.tile(matrix, start, stop).transposed_product(given)
            part = shaping.of_tile(part, start, self.matrices.arrays)
            mx.eval(part)
            logits[start:stop] = view(part)[0]
            del part
        return logits
