"""OpenBLAS's products, called on addresses of buffers: into any columns of a result."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from typing import Any

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112  # CBLAS's names
F32 = 4
Array = Any
"""`numpy.ndarray`, which need not be loaded where no product is computed."""


class OpenBlas:
    """The BLAS that `runtime.machine.backend.prepare` has loaded, for NumPy's float32 arrays."""

    def __init__(self) -> None:
        self._multiply = ctypes.CDLL(None).cblas_sgemm
        self._multiply.restype = None
        shape, matrix = (c_int,) * 6, (c_void_p, c_int)
        self._multiply.argtypes = (*shape, c_float, *matrix, *matrix, c_float, *matrix)

    def multiply(self, x: Array, w: Array, y: Array, add: bool) -> None:
        """y = x w, or with `add` y += x w, of x (T, C), w (C, R) and y (T, R).

        Rows or columns of x and w must be contiguous, and the rows of y.
        """
        (x_order, x_next), (w_order, w_next), (_, y_next) = map(_layout, (x, w, y))
        shape = (*y.shape, x.shape[1])
        given = (*_matrix(x, x_next), *_matrix(w, w_next), float(add), *_matrix(y, y_next))
        self._multiply(ROW_MAJOR, x_order, w_order, *shape, 1.0, *given)


def _layout(array: Array) -> tuple[int, int]:
    """How a matrix lies, and how many values its rows, or columns, are apart."""
    down, across = (stride // F32 for stride in array.strides)
    rows, columns = array.shape
    if across == 1 or columns == 1:
        return PLAIN, max(down, columns)
    return TRANSPOSED, max(across, rows)


def _matrix(array: Array, step: int) -> tuple[int, int]:
    return array.__array_interface__["data"][0], step
