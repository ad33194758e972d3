"""The threads of OpenBLAS, which wait for products in busy loops and so take cores from others."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def blas_threads() -> int:
    """The number of threads of the loaded OpenBLAS before one was left to it; 1 without it."""
    libraries = ctypes.CDLL(None)
    if not hasattr(libraries, "openblas_get_num_threads"):
        return 1
    return max(1, int(libraries.openblas_get_num_threads()))


def share_cores(alone: bool) -> None:
    """Leave one thread to OpenBLAS where other code multiplies by weights, else all of them."""
    threads, libraries = blas_threads(), ctypes.CDLL(None)
    if hasattr(libraries, "openblas_set_num_threads"):
        libraries.openblas_set_num_threads(1 if alone else threads)
