"""Products of values with frozen weights, in float32 or bfloat16, by MLX or oneDNN.

The factors are what a product takes: arrays of MLX, or for oneDNN the bits of bfloat16 values as
NumPy's uint16, since NumPy has no such type. Results are float32, and sums of products are taken in
float32. In bfloat16 both factors are rounded to the nearest, and nothing else, but that GPUs round
each product too; the reference is `tests.oracles.bfloat16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, CpuArrays, view
from runtime.arrays.dequantize import ABSORBED, codes, dequantize
from runtime.arrays.weight_source import FloatTile, Tile
from runtime.machine.onednn import OneDnn

Factor = Any
"""A matrix as products take it: `mx.array`, or the bits of bfloat16 values."""
Bits = npt.NDArray[np.uint16]
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

    packed_dtype = mx.float32
    """The type of factors in products with quantized words."""

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
    ) -> mx.array:
        """x w^T (T, R) for x (T, C) and w (R, C); if `by_rows` x w (T, C) for x (T, R).

        `onto`, which is consumed, and `added` are added if they are given.
        """
        y = self._product(x, w if by_rows else w.T, onto)
        return y if added is None else added.onto(y)

    def _product(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        return x @ w if onto is None else mx.addmm(onto, x, w)

    def put(self, x: Factor, w: Factor, whole: mx.array, where: slice) -> None:
        """x w^T (T, R), for w (R, C), as some columns of a larger array."""
        self.arrays.put(whole, (slice(None), where), self.multiply(x, w, False, None))

    def empty(self, rows: int, columns: int) -> Factor:
        """Memory for what `dequantize` returns of a tile (rows, columns)."""
        made = mx.zeros((rows, columns))
        mx.eval(made)
        return made

    def copy(self, values: Factor, to: Factor) -> None:
        """Copy a tile, in place."""
        self.arrays.put(to, slice(None), values)

    def rounded(self, x: mx.array) -> mx.array:
        """x, float32, with the values that a product multiplies."""
        return x


class GpuBfloat16Products(Products):
    """By MLX on a GPU, of factors that are rounded. Their sums are added in float32."""

    packed_dtype = mx.bfloat16

    def dequantize(self, tile: Tile, bits: int) -> mx.array:
        if isinstance(tile, FloatTile):
            return self.factor(tile.values)
        return self.factor(super().dequantize(tile, bits))

    def factor(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16)

    def _product(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return (x @ w).astype(mx.float32) if onto is None else onto + x @ w

    def empty(self, rows: int, columns: int) -> mx.array:
        return self.factor(super().empty(rows, columns))

    def rounded(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32)


class OneDnnProducts(Products):
    """In bfloat16 by oneDNN, which is called on buffers; MLX multiplies packed words in float32."""

    def __init__(self, arrays: Arrays, library: OneDnn) -> None:
        super().__init__(arrays)
        self.library = library

    def dequantize(self, tile: Tile, bits: int) -> Bits:
        if isinstance(tile, FloatTile):
            return self._stored(tile.values)
        words: npt.NDArray[np.uint32] = np.asarray(tile.words)
        scales = view(tile.scales)
        signed = codes(words, bits).reshape(*scales.shape, -1)
        values = np.empty(signed.shape, np.uint16)
        absorbing = (scales * np.float32(ABSORBED[bits])).reshape(-1)
        self.library.scale(signed, absorbing, values)
        return values.reshape(len(words), -1)

    def _stored(self, values: mx.array) -> Bits:
        """The bits of a matrix in floating point, which are as stored if it is bfloat16."""
        if values.dtype == mx.bfloat16:
            return np.asarray(values.view(mx.uint16))
        return self.factor(values.astype(mx.float32))

    def factor(self, x: mx.array) -> Bits:
        values = view(x)
        rounded = np.empty(values.shape, np.uint16)
        self.library.convert(values, rounded)
        return rounded

    def put(self, x: Bits, w: Bits, whole: mx.array, where: slice) -> None:
        self.library.multiply(x, w.T, view(whole)[:, where], add=False)

    def _product(self, x: Bits, w: Bits, onto: mx.array | None) -> mx.array:
        """The product, in place of `onto`."""
        y = mx.zeros((x.shape[0], w.shape[1])) if onto is None else onto
        self.library.multiply(x, w, view(y), add=onto is not None)
        return y

    def empty(self, rows: int, columns: int) -> Bits:
        return np.zeros((rows, columns), np.uint16)

    def copy(self, values: Bits, to: Bits) -> None:
        to[...] = values

    def rounded(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32)


def products_for(compute_dtype: str, arrays: Arrays, library: OneDnn | None) -> Products:
    """The products in "float32" or "bfloat16", by the library where there is one."""
    if library is not None:
        return OneDnnProducts(arrays, library)
    if compute_dtype == "float32":
        return Products(arrays)
    assert not isinstance(arrays, CpuArrays), "a plan in bfloat16 is for a machine that has it"
    return GpuBfloat16Products(arrays)
