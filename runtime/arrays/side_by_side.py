"""Products with packed weights where they lie, by all cores of a CPU.

A thread takes blocks of a matrix, dequantizes each into memory of its own, which stays in its
core's cache, and multiplies by it at once (`runtime.machine.openblas`). No two threads add to the
same values, so results do not depend on chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.arrays.packed_rows import Mapped, Stored
from runtime.arrays.stored import BLOCK_COLUMNS, BLOCK_ROWS, Matrix
from runtime.arrays.threads import Threads, steps
from runtime.machine.openblas import OpenBlas

Floats = npt.NDArray[np.float32]
LOW_HALVES = 0x0F0F


class SideBySide:
    """What threads multiply with: weights in a map, a BLAS, and memory for each thread."""

    def __init__(self, weights: Mapped, threads: Threads) -> None:
        self.weights, self.threads, self.blas = weights, threads, OpenBlas()
        self._buffers = [_Buffer() for _ in range(threads.count)]

    def part(self, matrix: Matrix, whole: Floats | None = None) -> Part:
        """A matrix of which threads take parts; `whole` is as it stays dequantized."""
        stored = self.weights.stored(matrix) if whole is None else ()
        return Part(matrix, stored, self.weights, whole, self.threads, self.blas, self._buffers)


@dataclass(frozen=True)
class Part:
    """A matrix where it lies, and products with it, or with parts of it in a thread."""

    matrix: Matrix
    stored: Stored
    weights: Mapped
    whole: Floats | None
    threads: Threads
    blas: OpenBlas
    buffers: Sequence[_Buffer]

    @property
    def rows(self) -> slice:
        return slice(0, self.matrix.rows)

    @property
    def columns(self) -> slice:
        return slice(0, self.matrix.columns)

    def rows_of(self, number: int) -> slice:
        """A thread's rows."""
        return self.threads.part(number, self.matrix.rows)

    def columns_of(self, number: int) -> slice:
        """A thread's columns, in whole groups."""
        return self.threads.part(number, self.matrix.columns, self.matrix.group_size or 1)

    def fill(self, whole: Floats) -> None:
        """The values (R, C), in place."""

        def task(number: int) -> None:
            rows = self.rows_of(number)
            self.tile(number, rows, whole[rows])

        self.threads.run(task)

    def put_by_columns(
        self,
        number: int,
        xs: Sequence[Floats],
        ys: Sequence[Floats],
        rows: slice,
        columns: slice,
        add: bool = False,
    ) -> None:
        """y = x W^T for a range of W's rows and columns, or with `add` y += it, in one thread.

        Each x (T, c) has these columns alone, or all; y (T, r) has these rows alone, or all.
        """
        for here, there, block in self._blocks(number, rows, columns):
            more = add or there.start > columns.start
            for x, y in zip(xs, ys, strict=True):
                given = x[:, _within(there, columns, x.shape[1])]
                self.blas.multiply(given, block.T, y[:, _within(here, rows, y.shape[1])], more)

    def put_by_rows(
        self,
        number: int,
        dy: Floats,
        dx: Floats,
        rows: slice,
        columns: slice,
        add: bool = False,
    ) -> None:
        """dx = dy W for a range of W's rows and columns, or with `add` dx += it, likewise."""
        for here, there, block in self._blocks(number, rows, columns):
            given = dy[:, _within(here, rows, dy.shape[1])]
            target = dx[:, _within(there, columns, dx.shape[1])]
            self.blas.multiply(given, block, target, add or here.start > rows.start)

    def tile(self, number: int, rows: slice, tile: Floats) -> Floats:
        """Whole rows (r, C), in the memory of `tile` unless they are in memory already."""
        if self.whole is not None:
            return self.whole[rows]
        for here in steps(rows, BLOCK_ROWS):
            into = tile[here.start - rows.start : here.stop - rows.start]
            for there in _column_steps(self.columns):
                self._dequantize(number, here, there, into[:, there])
        return tile

    def drop(self, rows: slice) -> None:
        """Drop the pages of rows of a matrix that is large and was read."""
        if self.whole is None:
            self.weights.drop(self.matrix, rows.start, rows.stop)

    def _blocks(
        self, number: int, rows: slice, columns: slice
    ) -> Iterator[tuple[slice, slice, Floats]]:
        """Rows, columns and values of each block; the next one replaces the values."""
        values = self.buffers[number].values
        for here in steps(rows, BLOCK_ROWS):
            for there in _column_steps(columns):
                if self.whole is not None:
                    yield here, there, self.whole[here, there]
                    continue
                shape = here.stop - here.start, there.stop - there.start
                block = values[: shape[0] * shape[1]].reshape(shape)
                self._dequantize(number, here, there, block)
                yield here, there, block

    def _dequantize(self, number: int, rows: slice, columns: slice, block: Floats) -> None:
        """The values of a block (r, c), in place."""
        matrix, (words, *groups) = self.matrix, self.stored
        if matrix.is_float:
            block[...] = _float32(words[rows, columns], matrix.packed.dtype)
            return
        assert matrix.scales is not None
        size, bits = matrix.group_size, matrix.bits
        stored = words[rows, columns.start * bits // 32 : columns.stop * bits // 32].view(np.uint8)
        of_groups = slice(columns.start // size, columns.stop // size)
        scales, *biases = (_float32(each[rows, of_groups], matrix.scales.dtype) for each in groups)
        biases = biases or [scales * np.float32(-(2.0 ** (bits - 1)))]
        np.copyto(block, stored if bits == 8 else self.buffers[number].halves(stored))
        grouped = block.reshape(*scales.shape, size)
        np.multiply(grouped, scales[..., None], out=grouped)
        np.add(grouped, biases[0][..., None], out=grouped)


class _Buffer:
    """The memory of one thread."""

    def __init__(self) -> None:
        size = BLOCK_ROWS * BLOCK_COLUMNS
        self.values = np.empty(size, np.float32)
        self._pairs, self._lifted = np.empty((2, size // 2), np.uint16)

    def halves(self, octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The halves of each byte (r, n), the lower first: (r, 2n)."""
        pairs, lifted = (
            each[: octets.size].reshape(octets.shape) for each in (self._pairs, self._lifted)
        )
        np.copyto(pairs, octets)
        np.left_shift(pairs, 4, out=lifted)
        np.bitwise_or(pairs, lifted, out=pairs)
        np.bitwise_and(pairs, np.uint16(LOW_HALVES), out=pairs)
        return pairs.view(np.uint8)


def _column_steps(columns: slice) -> Iterator[slice]:
    """Blocks' columns, which are whole groups."""
    for start in range(columns.start, columns.stop, BLOCK_COLUMNS):
        yield slice(start, min(columns.stop, start + BLOCK_COLUMNS))


def _within(part: slice, whole: slice, size: int) -> slice:
    """Where a part lies in an array of all, or of the range `whole` alone."""
    before = whole.start if size == whole.stop - whole.start else 0
    return slice(part.start - before, part.stop - before)


def _float32(values: npt.NDArray[np.generic], dtype: str) -> Floats:
    """As float32; NumPy holds bfloat16 as uint16."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
