"""Products of values with frozen weights, in float32 or bfloat16, by MLX.

`runtime.arrays.compiled_products` has others. Results are float32, and sums of products are taken
in float32. In bfloat16 both factors are rounded to the nearest, and nothing else, but that GPUs
round each product too; the reference is `tests.oracles.bfloat16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, CpuArrays, view
from runtime.arrays.dequantize import dequantize
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import FloatTile, Tile

Factor = Any
"""What a product takes: arrays of MLX, or of compiled ones an object with what they take."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """u b (T, N), of u (T, r) and some columns of b (r, M), which is added to a product.

    Of `transposed` b it is u b^T, of some rows of b (M, r). u and b are evaluated.
    """

    u: mx.array
    b: mx.array
    transposed: bool = False
    columns: slice | None = None  # all

    @property
    def rank(self) -> int:
        return int(self.u.shape[1])

    @property
    def views(self) -> tuple[Floats, Floats]:
        """u, its rows one after the other, and b (r, N)."""
        b = view(self.b).T if self.transposed else view(self.b)
        b = b if self.columns is None else b[:, self.columns]
        return np.ascontiguousarray(view(self.u)), b

    def onto(self, y: mx.array) -> mx.array:
        """y (T, N) with the product added, lazy."""
        b = self.b.T if self.transposed else self.b
        b = b if self.columns is None else b[:, self.columns]
        return mx.addmm(y, self.u.astype(y.dtype), b.astype(y.dtype))


class Products:
    """The products that kernels need, here in float32 by MLX: a BLAS on a CPU."""

    dtype = mx.float32
    """The type of factors."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def dequantize(self, tile: Tile, bits: int) -> Factor:
        """A tile (R, C), without its `shift`."""
        return dequantize(tile, bits, self.arrays)

    def factor(self, x: mx.array) -> Factor:
        """x (T, N) as a factor on the left."""
        return x

    def multiply(
        self,
        x: Factor,
        w: Factor,
        by_rows: bool,
        onto: mx.array | None,
        added: LowRank | None = None,
        to: mx.array | None = None,
    ) -> mx.array:
        """x w^T (T, R) for x (T, C) and w (R, C); if `by_rows` x w (T, C) for x (T, R).

        `onto`, which is consumed, and `added` are added if they are given. Where no array has to be
        made, the result may be in the memory of `to`, whose values are no longer needed.
        """
        y = self._product(x, w if by_rows else w.T, onto)
        return y if added is None else added.onto(y)

    def _product(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        return x @ w if onto is None else mx.addmm(onto, x, w)

    def rounded(self, x: mx.array, matrix: Matrix) -> mx.array:
        """x, float32, with the values that a product with a matrix multiplies."""
        return x


class GpuBfloat16Products(Products):
    """By MLX on a GPU, of factors that are rounded. Their sums are added in float32."""

    dtype = mx.bfloat16

    def dequantize(self, tile: Tile, bits: int) -> mx.array:
        if isinstance(tile, FloatTile):
            return self.factor(tile.values)
        return self.factor(super().dequantize(tile, bits))

    def factor(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16)

    def _product(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return (x @ w).astype(mx.float32) if onto is None else onto + x @ w

    def rounded(self, x: mx.array, matrix: Matrix) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32)


def products_for(compute_dtype: str, arrays: Arrays) -> Products:
    """The products in "float32" or, on a GPU, "bfloat16"."""
    if compute_dtype == "float32":
        return Products(arrays)
    assert not isinstance(arrays, CpuArrays), "on a CPU compiled code alone multiplies bfloat16"
    return GpuBfloat16Products(arrays)
