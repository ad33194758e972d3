"""Products of values with frozen weights, in float32 by MLX or in bfloat16 by oneDNN.

The factors are what a product takes: float32 arrays of MLX, or the bits of bfloat16 values as
NumPy's uint16, since NumPy has no such type. Results are float32, and sums of products are taken in
float32. `Bfloat16Products` rounds both factors to the nearest, and nothing else; its reference is
`tests.oracles.bfloat16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, view
from runtime.arrays.dequantize import FLIP4, FLIP8, HIGH, dequantize, join, split
from runtime.arrays.weight_source import FloatTile, Tile
from runtime.machine.onednn import OneDnn, loaded

Factor = Any
"""A matrix as products take it: `mx.array` of float32, or the bits of bfloat16 values."""
Bits = npt.NDArray[np.uint16]


class Products(Protocol):
    """The products that kernels need. Columns of weights have an order that only this knows."""

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


class Bfloat16Products:
    """By oneDNN. Of 4 bits the even columns come first, then the odd ones, in one matrix."""

    def __init__(self, library: OneDnn) -> None:
        self.library = library

    def dequantize(self, tile: Tile, bits: int) -> tuple[Bits, ...]:
        if isinstance(tile, FloatTile):
            return (self._stored(tile.values),)
        words: npt.NDArray[np.uint32] = np.asarray(tile.words)
        scales = view(tile.scales)
        columns = words.shape[1] * 32 // bits
        values = np.empty((len(words), columns), np.uint16)
        if bits == 8:
            self._scale(words ^ np.uint32(FLIP8), scales, values)
            return (values,)
        # shifted left by 4 bits: 16 times the code
        flipped, scales = words ^ np.uint32(FLIP4), scales * np.float32(1 / 16)
        self._scale(flipped & np.uint32(HIGH), scales, values[:, columns // 2 :])
        np.left_shift(flipped, 4, out=flipped)
        np.bitwise_and(flipped, np.uint32(HIGH), out=flipped)
        self._scale(flipped, scales, values[:, : columns // 2])
        return (values,)

    def _scale(self, words: npt.NDArray[np.uint32], scales: npt.NDArray[Any], to: Bits) -> None:
        """The codes of words times the scales of their groups, rounded."""
        rows, groups = scales.shape
        shape = (rows, groups, to.shape[1] // groups)
        self.library.scale(address(words), address(scales), address(to), shape, _row(to))

    def _stored(self, values: mx.array) -> Bits:
        """The bits of a matrix in floating point, which are as stored if it is bfloat16."""
        if values.dtype == mx.bfloat16:
            return np.asarray(values.view(mx.uint16))
        return self.whole(values.astype(mx.float32))

    def split(self, x: mx.array, bits: int) -> tuple[Bits, ...]:
        if bits != 4:
            return (self.whole(x),)
        values = view(x)
        rounded = np.empty(values.shape, np.uint16)
        half = values.shape[1] // 2
        self._round(values[:, 0::2], rounded[:, :half])
        self._round(values[:, 1::2], rounded[:, half:])
        return (rounded,)

    def whole(self, x: mx.array) -> Bits:
        values = view(x)
        rounded = np.empty(values.shape, np.uint16)
        self._round(values, rounded)
        return rounded

    def _round(self, values: npt.NDArray[np.float32], to: Bits) -> None:
        shape, item = values.shape, values.itemsize
        strides = (values.strides[0] // item, values.strides[1] // item)
        self.library.round(address(values), address(to), (shape[0], shape[1]), strides, _row(to))

    def by_columns(self, x: Bits, w: Bits, onto: mx.array | None) -> mx.array:
        return self._multiply(x, w, onto, w.shape[0], True)

    def by_rows(self, x: Bits, w: Bits, onto: mx.array | None) -> mx.array:
        return self._multiply(x, w, onto, w.shape[1], False)

    def _multiply(
        self, x: Bits, w: Bits, onto: mx.array | None, columns: int, transposed: bool
    ) -> mx.array:
        """The product, in place of `onto`."""
        tokens, inner = x.shape
        y = mx.zeros((tokens, columns)) if onto is None else onto
        mx.eval(y)
        shape = (tokens, inner, columns)
        self.library.multiply(address(x), address(w), address(view(y)), shape, transposed)
        return y

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

    def empty(self, rows: int, columns: int, bits: int) -> tuple[Bits, ...]:
        return (np.zeros((rows, columns), np.uint16),)

    def copy(self, values: Bits, to: Bits) -> None:
        to[...] = values

    def rounded(self, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16).astype(mx.float32)


def products_for(compute_dtype: str, arrays: Arrays) -> Products:
    """The products in "float32" or "bfloat16", for which oneDNN must have been loaded."""
    if compute_dtype == "float32":
        return Float32Products(arrays)
    library = loaded()
    assert library is not None, "a plan in bfloat16 follows from a machine that multiplies it"
    return Bfloat16Products(library)


def address(values: npt.NDArray[Any]) -> int:
    """Where an array's values lie in memory."""
    place: int = values.__array_interface__["data"][0]
    return place


def _row(values: Bits) -> int:
    """The values from the beginning of a row to that of the next."""
    return values.strides[0] // values.itemsize
