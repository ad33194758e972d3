"""Products of values with frozen weights, in float32 or bfloat16, by MLX or oneDNN.

The factors are what a product takes: float32 arrays, or the bits of bfloat16 values as NumPy's
uint16, since NumPy has no such type. Results are float32, and sums of products are taken in
float32. In bfloat16 both factors are rounded to the nearest, and nothing else, but that GPUs round
each product too; the reference is `tests.oracles.bfloat16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, GpuArrays, view
from runtime.arrays.dequantize import FLIP4, FLIP8, HIGH, dequantize, join, split
from runtime.arrays.weight_source import FloatTile, Tile

Factor = Any
"""A matrix as products take it: of MLX, or of NumPy with float32 or the bits of bfloat16 values."""


class Products(Protocol):
    """The products that kernels need. Columns of weights have an order that only this knows."""

    arrays: Arrays
    packed_dtype: mx.Dtype
    """The type of factors in products with quantized words."""

    def dequantize(self, tile: Tile, bits: int) -> tuple[Factor, ...]:
        """A tile (R, C), without its `shift`, as matrices (R, C') of some of its columns."""

    def split(self, x: mx.array, bits: int) -> tuple[Factor, ...]:
        """x (T, C) as matrices (T, C') of the columns that `dequantize` takes together."""

    def whole(self, x: mx.array) -> Factor:
        """x (T, R), a factor on the left of a tile's rows."""

    def by_columns(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        """x w^T (T, R) for x (T, C) and w (R, C), added to `onto` if it is given."""

    def by_rows(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        """x w (T, C) for x (T, R) and w (R, C), added to `onto` if it is given."""

    def put(
        self, whole: mx.array, where: slice, xs: Sequence[Factor], ws: Sequence[Factor]
    ) -> None:
        """The columns `where` of whole (T, W) are the sum of x w^T (T, R) of all parts."""

    def columns(self, x: mx.array, where: slice) -> mx.array:
        """Some columns of x (T, R), as `whole` takes them."""

    def join(self, parts: Sequence[mx.array], bits: int) -> mx.array:
        """Products (T, C') by rows with all parts of a tile, as one (T, C) in order."""

    def empty(self, rows: int, columns: int, bits: int) -> tuple[Factor, ...]:
        """Memory for what `dequantize` returns of a tile (rows, columns)."""

    def copy(self, values: Factor, to: Factor) -> None:
        """Copy a part of a tile, in place."""

    def rounded(self, x: mx.array) -> mx.array:
        """x, float32, with the values that a product multiplies."""


class Float32Products:
    """By MLX: a BLAS on a CPU."""

    packed_dtype = mx.float32

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def dequantize(self, tile: Tile, bits: int) -> tuple[mx.array, ...]:
        return dequantize(tile, bits, self.arrays)

    def split(self, x: mx.array, bits: int) -> tuple[mx.array, ...]:
        return split(x, bits, self.arrays)

    def whole(self, x: mx.array) -> mx.array:
        return x

    def by_columns(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return x @ w.T if onto is None else mx.addmm(onto, x, w.T)

    def by_rows(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return x @ w if onto is None else mx.addmm(onto, x, w)

    def put(
        self, whole: mx.array, where: slice, xs: Sequence[mx.array], ws: Sequence[mx.array]
    ) -> None:
        total: mx.array | None = None
        for x, w in zip(xs, ws, strict=True):
            total = self.by_columns(x, w, total)
        assert total is not None
        self.arrays.put(whole, (slice(None), where), total)

    def columns(self, x: mx.array, where: slice) -> mx.array:
        # contiguous: else every product with a column would make its own copy
        return self.arrays.contiguous(x, (slice(None), where))

    def join(self, parts: Sequence[mx.array], bits: int) -> mx.array:
        return join(tuple(parts), self.arrays)

    def empty(self, rows: int, columns: int, bits: int) -> tuple[mx.array, ...]:
        parts = 2 if bits == 4 else 1
        made = tuple(mx.zeros((rows, columns // parts)) for _ in range(parts))
        mx.eval(made)
        return made

    def copy(self, values: mx.array, to: mx.array) -> None:
        self.arrays.put(to, slice(None), values)

    def rounded(self, x: mx.array) -> mx.array:
        return x


class GpuBfloat16Products(Float32Products):
    """By MLX on a GPU, of factors that are rounded. Their sums are added in float32."""

    packed_dtype = mx.bfloat16

    def dequantize(self, tile: Tile, bits: int) -> tuple[mx.array, ...]:
        if isinstance(tile, FloatTile):
            return (self.whole(tile.values),)
        return tuple(map(self.whole, super().dequantize(tile, bits)))

    def split(self, x: mx.array, bits: int) -> tuple[mx.array, ...]:
        return tuple(map(self.whole, super().split(x, bits)))

    def whole(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16)

    def by_columns(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return self._sum(x @ w.T, onto)

    def by_rows(self, x: mx.array, w: mx.array, onto: mx.array | None) -> mx.array:
        return self._sum(x @ w, onto)

    def _sum(self, product: mx.array, onto: mx.array | None) -> mx.array:
        return product.astype(mx.float32) if onto is None else onto + product

    def empty(self, rows: int, columns: int, bits: int) -> tuple[mx.array, ...]:
        return tuple(map(self.whole, super().empty(rows, columns, bits)))

    def rounded(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32)


class OneDnnProducts:
    """By oneDNN. Of 4 bits the even columns come first, then the odd ones, in one matrix."""

    packed_dtype = mx.float32  # which MLX multiplies

    def __init__(self, arrays: Arrays, compute_dtype: str) -> None:
        assert arrays.library is not None
        self.arrays, self.library = arrays, arrays.library
        self.rounds = compute_dtype == "bfloat16"
        self.dtype = np.dtype(np.uint16 if self.rounds else np.float32)

    def dequantize(self, tile: Tile, bits: int) -> tuple[Factor, ...]:
        if isinstance(tile, FloatTile):
            return (self._stored(tile.values),)
        words: npt.NDArray[np.uint32] = np.asarray(tile.words)
        scales = view(tile.scales)
        rows, groups = scales.shape
        parts, width = 8 // bits, words.size * 4 // scales.size
        halves = np.empty((rows, parts, groups, width), self.dtype)
        values = halves.reshape(rows, -1)
        if bits == 8:
            self._scale(words ^ np.uint32(FLIP8), scales, halves[:, 0])
            return (values,)
        # shifted left by 4 bits: 16 times the code
        flipped, scales = words ^ np.uint32(FLIP4), scales * np.float32(1 / 16)
        self._scale(flipped & np.uint32(HIGH), scales, halves[:, 1])
        np.left_shift(flipped, 4, out=flipped)
        np.bitwise_and(flipped, np.uint32(HIGH), out=flipped)
        self._scale(flipped, scales, halves[:, 0])
        return (values,)

    def _scale(self, words: npt.NDArray[np.uint32], scales: npt.NDArray[Any], to: Factor) -> None:
        """The codes of words times the scales of their groups, as products take them."""
        codes = words.view(np.int8).reshape(to.shape)
        self.library.scale(codes, scales.reshape(-1), to)

    def _stored(self, values: mx.array) -> Factor:
        """A matrix in floating point: of MLX, by which it may be moved, or bits of bfloat16."""
        if self.rounds and values.dtype == mx.bfloat16:
            return np.asarray(values.view(mx.uint16))
        wide = values.astype(mx.float32)
        self.arrays.settle(wide)
        return self.whole(wide) if self.rounds else wide

    def split(self, x: mx.array, bits: int) -> tuple[Factor, ...]:
        if bits != 4:
            return (self.whole(x),)
        values = view(x)
        parted = np.empty(values.shape, self.dtype)
        half = values.shape[1] // 2
        convert = self.library.convert if self.rounds else _copy  # it keeps code for each shape
        convert(values[:, 0::2], parted[:, :half])
        convert(values[:, 1::2], parted[:, half:])
        return (parted,)

    def whole(self, x: mx.array) -> Factor:
        values = view(x)
        if not self.rounds:
            return values
        rounded = np.empty(values.shape, self.dtype)
        self.library.convert(values, rounded)
        return rounded

    def by_columns(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        return self._multiply(x, _values(w).T, onto)

    def by_rows(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        return self._multiply(x, _values(w), onto)

    def _multiply(self, x: Factor, w: Factor, onto: mx.array | None) -> mx.array:
        """The product, in place of `onto`."""
        y = mx.zeros((x.shape[0], w.shape[1])) if onto is None else onto
        self.library.multiply(x, w, view(y), add=onto is not None)
        return y

    def put(
        self, whole: mx.array, where: slice, xs: Sequence[Factor], ws: Sequence[Factor]
    ) -> None:
        (x,), (w,) = xs, ws
        self.library.multiply(x, _values(w).T, view(whole)[:, where], add=False)

    def columns(self, x: mx.array, where: slice) -> mx.array:
        return x[:, where]

    def join(self, parts: Sequence[mx.array], bits: int) -> mx.array:
        (part,) = parts
        if bits != 4:
            return part
        values = view(part)
        whole = mx.zeros(part.shape)
        mx.eval(whole)
        ordered, half = view(whole), values.shape[1] // 2
        ordered[:, 0::2], ordered[:, 1::2] = values[:, :half], values[:, half:]
        return whole

    def empty(self, rows: int, columns: int, bits: int) -> tuple[Factor, ...]:
        return (np.zeros((rows, columns), self.dtype),)

    def copy(self, values: Factor, to: Factor) -> None:
        to[...] = _values(values)

    def rounded(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32) if self.rounds else x


def _copy(values: npt.NDArray[np.float32], to: npt.NDArray[np.float32]) -> None:
    to[...] = values


def _values(factor: Factor) -> npt.NDArray[Any]:
    return view(factor) if isinstance(factor, mx.array) else factor


def products_for(compute_dtype: str, arrays: Arrays) -> Products:
    """The products in "float32" or "bfloat16", by oneDNN where the arrays use it."""
    if arrays.library is not None:
        return OneDnnProducts(arrays, compute_dtype)
    if compute_dtype == "float32":
        return Float32Products(arrays)
    assert isinstance(arrays, GpuArrays), "a plan in bfloat16 follows from a machine that has it"
    return GpuBfloat16Products(arrays)
