"""Products with quantized tiles where they lie in the map, by code that LLVM has compiled.

A thread takes 64 columns of a result at a time. It dequantizes as much of the tile as stays in the
processor's caches (32 KB), multiplies it by all tokens, and goes on along the inner dimension:

    for columns j of y, a few at a time:          (threads take them as they become free)
        for a part k of the inner dimension:
            P = dequantized W[k, j]               (stays in the caches)
            for six tokens t: y[t, j] += x[t, k] P, in strips of as many columns as registers hold

So no dequantized tile is written to memory, and the result depends neither on the number of threads
nor on which of them was free. The values of P are those of `runtime.arrays.dequantize` to the last
bit. Sums are float32: in order within a part k, and then of the parts, since a vocabulary of small
terms, each added to a sum that is large already, would be lost.

In bfloat16 both x and P are rounded to the nearest, and a processor with AVX512-BF16 adds two
products at once to each sum. Matrices in floating point are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays, view
from runtime.arrays.product_text import (
    DEPTH,
    F32,
    NARROW,
    WIDE,
    Registers,
    rounding_text,
    text_of,
)
from runtime.arrays.products import Factor, Floats, LowRank, Products
from runtime.arrays.stored import Matrix
from runtime.arrays.stored_codes import Stored
from runtime.core.remembered import remembered
from runtime.machine.machine_code import Text, compile_all, function
from runtime.machine.processor import cpu_flags
from runtime.machine.threads import Team, prepare, team

PARTS = 2  # of a product for each thread, at least, where they have
INNER = {"float32": 1, "bfloat16": 2}  # values of a type in 32 bits
FEWEST_TOKENS = 64  # each
ROUNDED = 8192  # values that a thread rounds at once, or those of a token
MOST_WORK = 2_000_000  # tokens x inner dimension of a part: some 2 ms


class MapTile:
    """Rows of a quantized matrix, or columns, where they lie in a map, as long as it exists."""

    def __init__(self, matrix: Matrix, mapped: AbstractContextManager[Stored]) -> None:
        self._mapped = mapped
        words, scales, *biases = self._parts = mapped.__enter__()
        self.rows, groups = scales.shape
        self.columns, self.matrix = groups * matrix.group_size, matrix
        self.groups = scales.strides[0] // scales.itemsize  # to the next row
        arrays = words, scales, *(biases or [scales])
        self.addresses = [array.ctypes.data for array in arrays]

    def __del__(self) -> None:
        self._mapped.__exit__(None, None, None)


def compile_for(matrices: Iterable[Matrix], compute_dtype: str) -> None:
    """Compile what products with these matrices take, all at once."""
    packed = [matrix for matrix in matrices if not matrix.is_float]
    inner = INNER[compute_dtype]
    texts = {_text(matrix, by_rows, inner) for matrix in packed for by_rows in (False, True)}
    if compute_dtype == "bfloat16":
        texts.add(_rounding_text())
    compile_all(texts)
    prepare()


class Rounded:
    """x (T, N), and its values as bfloat16, which are made when the first product takes them."""

    def __init__(self, x: mx.array) -> None:
        self.x = x

    @remembered
    def pairs(self, team: Team) -> Floats:
        """Two values in the place of one float32; a last one without another has 0 beside it."""
        given = view(self.x)
        if given.strides[1] != F32:
            given = np.ascontiguousarray(given)
        rows, columns = given.shape
        halves = np.empty((rows, 2 * -(-columns // 2)), np.uint16)
        result: Floats = halves.view(np.float32)
        if result.size:
            few, places = max(1, ROUNDED // columns), (address(given), address(result))
            job = 0, few, rows, columns, *places, given.strides[0] // F32
            team.run(function(_rounding_text(), 2), job, -(-rows // few))
        return result


class CompiledProducts(Products):
    """Products with tiles of a map by compiled code, with others by MLX, in float32."""

    def __init__(self, arrays: Arrays, threads: int, compute_dtype: str = "float32") -> None:
        super().__init__(arrays)
        self.team = team(threads, DEPTH * registers().part_width)
        self.inner = INNER[compute_dtype]

    def factor(self, x: mx.array) -> Factor:
        """See `Products`."""
        return x if self.inner == 1 else Rounded(x)

    def rounded(self, x: mx.array, matrix: Matrix) -> mx.array:
        """See `Products`."""
        exact = self.inner == 1 or matrix.is_float
        return x if exact else x.astype(mx.bfloat16).astype(mx.float32)

    def multiply(
        self,
        x: Factor,
        w: Factor,
        by_rows: bool,
        onto: mx.array | None,
        added: LowRank | None = None,
        to: mx.array | None = None,
    ) -> mx.array:
        """See `Products`; the product is in place of `onto`, or else in `to`."""
        plain = x.x if isinstance(x, Rounded) else x
        if not isinstance(w, MapTile):
            return super().multiply(plain, w, by_rows, onto, added)
        columns = w.columns if by_rows else w.rows
        y = to if onto is None else onto
        y = mx.zeros((plain.shape[0], columns)) if y is None else y
        apart = added if added is not None and added.rank > DEPTH else None
        how = by_rows, onto is not None
        given = x.pairs(self.team) if isinstance(x, Rounded) else view(x)
        self._do(given, w, view(y), how, added if apart is None else None)
        return y if apart is None else apart.onto(y)

    def _do(
        self, x: Floats, w: MapTile, y: Floats, how: tuple[bool, bool], added: LowRank | None
    ) -> None:
        by_rows, adds = how
        columns, depth = (w.columns, w.rows) if by_rows else (w.rows, w.columns)
        assert y.shape == (len(x), columns) and x.shape[1] == -(-depth // self.inner)
        if not len(x):
            return
        if x.strides[1] != F32:
            x = np.ascontiguousarray(x)
        assert y.strides[1] == F32
        places = *w.addresses, address(x), address(y)
        steps = x.strides[0] // F32, y.strides[0] // F32
        further: tuple[int, ...] = (0, 0, 0, 0, 0)
        if added is not None:
            u, b = added.views
            further = added.rank, address(u), address(b), *(step // F32 for step in b.strides)
        block, parts = _blocks(len(x), columns, depth, self.team.threads)
        job = (0, *places, len(x), *steps, columns, depth, w.groups, int(adds), *further, block)
        self.team.run(function(_text(w.matrix, by_rows, self.inner), 2), job, parts)


def address(array: Floats) -> int:
    """Where an array's values lie in memory, which compiled code is given."""
    assert array.dtype == np.float32, "other values would be read past their end"
    return int(array.ctypes.data)


def _blocks(tokens: int, columns: int, depth: int, threads: int) -> tuple[int, int]:
    """How many tokens a part has, and how many parts a product.

    Every part dequantizes by itself, so there are no more than threads take, unless they would be
    so long that a thread which has begun one is waited for.
    """
    if threads == 1:
        return tokens, -(-columns // registers().part_width)
    of_columns = -(-columns // registers().part_width)
    wanted = min(-(-PARTS * threads // of_columns), tokens // FEWEST_TOKENS)
    block = -(-tokens // max(1, wanted, tokens * depth // MOST_WORK))
    return block, of_columns * -(-tokens // block)


@cache
def registers() -> Registers:
    """Those of this processor."""
    return WIDE if "avx512f" in cpu_flags() else NARROW


def _text(matrix: Matrix, by_rows: bool, inner: int) -> Text:
    """A matrix's products, in LLVM's language."""
    scales, affine = matrix.scales, matrix.biases is not None
    assert scales is not None, "a matrix in floating point is multiplied by a BLAS"
    kind = by_rows, matrix.bits, matrix.group_size, scales.dtype, affine
    return Text(text_of, (*kind, registers(), inner))


def _rounding_text() -> Text:
    return Text(rounding_text, (registers().lanes,))
