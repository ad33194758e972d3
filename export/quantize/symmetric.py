"""Scales of least squared error for groups that are stored without biases.

For a group w and given integers q the best scale is s = <w, q> / <q, q>; it leaves the error
|w|^2 - <w, q>^2 / <q, q>, so the scale to choose is the one whose q has the largest gain
<w, q>^2 / <q, q>. Each candidate scale maps the value of largest magnitude near the negative end of
the integers, which reach one further there (-8..7); s may be negative. Two rounds of least squares,
from s to q and back, follow the search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from export.stored import F32

# candidates, by bits: by how much the largest value lies beyond the integers' negative end
STRETCH = {4: np.linspace(-0.15, 0.45, 19), 8: np.linspace(-0.01, 0.03, 5)}


def fit(w: F32, bits: int, dtype: npt.DTypeLike) -> tuple[npt.NDArray[np.floating[Any]], None]:
    """The scales (G,), of type `dtype`, for groups w (G, group_size), and no biases.

    A scale that is too large for its type is infinite.
    """
    low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    peak = np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)[:, 0]
    safe = np.where(peak == 0, np.float32(1), peak)
    best_gain = np.full(len(w), -1, np.float32)
    best_scale = np.zeros(len(w), np.float32)
    q = np.empty_like(w)

    def try_scales(inverse: F32) -> None:
        np.multiply(w, inverse[:, None], out=q)
        np.rint(q, out=q)
        np.clip(q, low, high, out=q)
        along = np.einsum("gk,gk->g", w, q)
        square = np.maximum(np.einsum("gk,gk->g", q, q), np.float32(1e-30))
        gain = along * along / square
        better = gain > best_gain
        best_gain[better] = gain[better]
        best_scale[better] = (along / square)[better]

    for stretch in STRETCH[bits]:
        try_scales((np.float32(low * (1 + stretch)) / safe).astype(np.float32))
    for _ in range(2):
        try_scales(np.divide(1, best_scale, out=np.zeros_like(best_scale), where=best_scale != 0))
    best_scale[best_gain < 0] = np.inf  # the gain is not a number: too large
    return best_scale.astype(dtype), None
