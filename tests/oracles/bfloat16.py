"""Products of values rounded to bfloat16, in NumPy: the slow reference of oneDNN's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SPACING = 2.0**-8  # of bfloat16: a value is rounded by half of this times itself at most


def rounded(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The nearest values of bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32)


def product(x: npt.ArrayLike, w: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """x w for x (T, C) and w (C, R), both rounded; summed in float64."""
    return rounded(x).astype(np.float64) @ rounded(w).astype(np.float64)
