"""OpenBLAS called on raw buffers, by as many of our own threads as there are cores.

Each of our threads multiplies by itself, so OpenBLAS is told to use one thread: what lies between
products runs on all cores, too, and none of OpenBLAS's own threads waits in a busy loop.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from typing import Any

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112  # CBLAS_ORDER and CBLAS_TRANSPOSE
ITEM = 4  # bytes of a float32

Array = Any
"""`numpy.ndarray`, which need not be loaded where no product is computed."""


_threads: list[int] = []  # that OpenBLAS had before it was told to use another number


def threads() -> int:
    """How many threads OpenBLAS has, or had before `use_one`; 1 for another BLAS."""
    if _threads:
        return _threads[0]
    libraries = ctypes.CDLL(None)
    if not hasattr(libraries, "openblas_get_num_threads"):
        return 1
    return max(1, int(libraries.openblas_get_num_threads()))


def use_one(alone: bool) -> None:
    """Leave one thread to OpenBLAS where others multiply, else all that it had.

    Threads that have nothing to do take a core: they wait in busy loops.
    """
    libraries = ctypes.CDLL(None)
    if hasattr(libraries, "openblas_set_num_threads"):
        _threads[:] = [threads()]
        libraries.openblas_set_num_threads(1 if alone else _threads[0])


class OpenBlas:
    """The OpenBLAS that this process has loaded; any number of threads may call it."""

    def __init__(self) -> None:
        self._sgemm = ctypes.CDLL(None).cblas_sgemm
        numbers, floats, places = c_int, c_float, c_void_p
        self._sgemm.argtypes = [
            *([numbers] * 6),
            *(floats, places, numbers, places, numbers),
            *(floats, places, numbers),
        ]
        self._sgemm.restype = None

    def multiply(self, x: Array, w: Array, y: Array, add: bool = False) -> None:
        """y = x w, or with `add` y += x w, of float32 x (T, C), w (C, R) and y (T, R).

        Rows or columns of x and w must be contiguous, and the rows of y.
        """
        (tokens, columns), rows = x.shape, w.shape[1]
        (x_way, x_step), (w_way, w_step) = _laid(x), _laid(w)
        self._sgemm(
            *(ROW_MAJOR, x_way, w_way, tokens, rows, columns),
            *(1.0, _place(x), x_step, _place(w), w_step),
            *(1.0 if add else 0.0, _place(y), max(1, y.strides[0] // ITEM)),
        )


def _laid(array: Array) -> tuple[int, int]:
    """Whether a matrix lies transposed in memory, and how many values its lines are apart."""
    (lines, items), (rows, columns) = array.strides, array.shape
    if items == ITEM or columns == 1:
        return PLAIN, max(columns, lines // ITEM)
    return TRANSPOSED, max(rows, items // ITEM)


def _place(array: Array) -> int:
    place: int = array.__array_interface__["data"][0]
    return place
