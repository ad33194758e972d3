"""The logits kernel: the scores of all tokens of the vocabulary, a tile of the matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, view
from runtime.arrays.matrices import Matrices
from runtime.arrays.stored import Matrix
from runtime.arrays.values import Lora


@dataclass(frozen=True)
class Shaping:
    """What a head makes of the products h W^T: it adds s (h A) B and a bias (V,), and caps them.

    Any of the three may be missing; A (D, r) and B (r, V) are the `lora`'s.
    """

    bias: mx.array | None = None
    cap: float | None = None
    lora: Lora | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the products are the logits."""
        return self.bias is None and self.cap is None and self.lora is None

    def through_a(self, h: mx.array, arrays: Arrays) -> mx.array | None:
        """s h A (N, r), evaluated; None without LoRA."""
        if self.lora is None:
            return None
        through = (h @ self.lora.a) * self.lora.scale
        arrays.settle(through)
        return through

    def columns(self, rows: npt.NDArray[np.int64]) -> mx.array:
        """The columns (r, K) of B that belong to chosen rows (K,) of W."""
        assert self.lora is not None, "the head has no adapter"
        return mx.take(self.lora.b, mx.array(rows.astype(np.int32)), axis=1)

    def of_tile(
        self, products: mx.array, start: int, arrays: Arrays, through_a: mx.array | None = None
    ) -> mx.array:
        """The logits (N, R) of products with the rows from `start` on, which are consumed."""
        stop = start + products.shape[1]
        if self.lora is not None and through_a is not None:
            products = mx.addmm(products, through_a, self.lora.b[:, start:stop])
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
        arrays = self.matrices.arrays
        through_a = shaping.through_a(h, arrays)
        if self.matrices.in_place is not None:
            (y,) = self.matrices.of_rows(view(h), [matrix])
            return view(shaping.of_tile(mx.array(y), 0, arrays, through_a)).reshape(-1)
        given = self.matrices.input(h)
        logits = np.empty(matrix.rows, np.float32)
        for start, stop in self.matrices.ranges(matrix):
            part = self.matrices.tile(matrix, start, stop).transposed_product(given)
            part = shaping.of_tile(part, start, arrays, through_a)
            mx.eval(part)
            logits[start:stop] = view(part)[0]
            del part
        return logits
