"""One row of values times packed weights where they lie, compiled by Numba for this processor.

MLX multiplies packed weights on a CPU one value at a time, after they were copied out of the map.
Here all cores read them from the map, by the processor's widest instructions. Values are float32,
and so are sums, whose order is the compiler's. Numba comes with the extra `numba`; it is loaded
only where a plan uses it. Its own threads are not used: they take 0.1 ms to start on a product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Matrix
from runtime.core.errors import UsageError

Floats = npt.NDArray[np.float32]
Stored = tuple[npt.NDArray[Any], ...]
"""A matrix in the map: words (R, C * bits / 32), scales (R, G), and biases (R, G) if it has any."""
ALONE = 1 << 20  # weights; of fewer a second thread costs what it saves
FREE_ORDER = {"reassoc", "contract", "nsz"}  # of sums, so that several are taken at once


class Mapped(Protocol):
    """Weights that lie in a map."""

    def stored(self, matrix: Matrix) -> Stored:
        """A whole matrix where it lies."""

    def drop(self, matrix: Matrix, start: int, stop: int) -> None:
        """Drop the pages of rows of a matrix from this process."""


class PackedRows:
    """The compiled products, by so many threads. Only one thread may call them.

    Raises:
        UsageError: Numba is installed, but cannot be loaded.
    """

    def __init__(self, weights: Mapped, threads: int) -> None:
        # it loads `logging`, which runs that train need not
        from concurrent.futures import ThreadPoolExecutor

        self.weights, self.threads = weights, threads
        self._rows = {4: _compiled(_rows4), 8: _compiled(_rows8)}
        self._others = ThreadPoolExecutor(max(1, threads - 1))

    def multiply(self, x: Floats, matrix: Matrix) -> Floats:
        """x W^T (R,) for x (C,) and a matrix that is `compact`."""
        assert matrix.scales is not None
        words, scales, *biases = self.weights.stored(matrix)
        sums = x.reshape(scales.shape[1], -1).sum(axis=1)
        if not biases:  # bias = -2**(bits-1) * scale
            sums, biases = sums * np.float32(-(2.0 ** (matrix.bits - 1))), [scales]
        parts = (x,) if matrix.bits == 8 else (x[0::2].copy(), x[1::2].copy())
        groups = (array.view(np.uint16) for array in (scales, *biases))
        y = np.empty(matrix.rows, np.float32)
        values = _values(matrix.scales.dtype)
        given = (words.view(np.uint8), *groups, values, *parts, sums, y)
        threads = self.threads if matrix.rows * matrix.columns >= ALONE else 1
        ends = [matrix.rows * number // threads for number in range(threads + 1)]
        compiled = self._rows[matrix.bits]
        others = [self._others.submit(compiled, *given, *rows) for rows in pairwise(ends[1:])]
        compiled(*given, *ends[:2])
        for other in others:
            other.result()
        return y


@cache
def _values(dtype: str) -> Floats:
    """The value of each number of a type of 16 bits, by its bits (65536,)."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if dtype == "bfloat16":
        return (bits << 16).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _compiled(function: Callable[..., None]) -> Any:
    """The function for this processor, kept in a file if there is a folder that can be written."""
    try:
        from numba import njit
    except (ImportError, OSError) as problem:  # such as for another version of NumPy
        raise UsageError(
            f"Numba is installed and cannot be loaded ({problem}): pip install "
            "'ondevice-tune[numba]', or do without: pip uninstall numba"
        ) from None
    try:
        return njit(cache=True, nogil=True, fastmath=FREE_ORDER)(function)
    except RuntimeError:  # no such folder: it is compiled in each process, in a second
        return njit(nogil=True, fastmath=FREE_ORDER)(function)


def _rows4(codes, scales, biases, values, even, odd, sums, y, start, stop):  # type: ignore[no-untyped-def]
    """Rows start:stop of y, of two values in a byte, the first lowest; x is split likewise."""
    groups = scales.shape[1]
    width = codes.shape[1] // groups
    for row in range(start, stop):
        of_row, total = codes[row], np.float32(0)
        for group in range(groups):
            of_group = np.float32(0)
            for at in range(width):  # from 0: else it is not compiled to wide instructions
                place = group * width + at
                low, high = of_row[place] & np.uint8(15), of_row[place] >> np.uint8(4)
                of_group += np.float32(np.int32(low)) * even[place]
                of_group += np.float32(np.int32(high)) * odd[place]
            total += of_group * values[scales[row, group]]
            total += values[biases[row, group]] * sums[group]
        y[row] = total


def _rows8(codes, scales, biases, values, x, sums, y, start, stop):  # type: ignore[no-untyped-def]
    """Rows start:stop of y, of one value in a byte."""
    groups = scales.shape[1]
    width = codes.shape[1] // groups
    for row in range(start, stop):
        of_row, total = codes[row], np.float32(0)
        for group in range(groups):
            of_group = np.float32(0)
            for at in range(width):
                place = group * width + at
                of_group += np.float32(np.int32(of_row[place])) * x[place]
            total += of_group * values[scales[row, group]]
            total += values[biases[row, group]] * sums[group]
        y[row] = total
