"""Symmetric integer quantization by groups, with a search for the scale of least squared error.

For a group w and given integers q the best scale is s = <w, q> / <q, q>; it leaves the error
|w|^2 - <w, q>^2 / <q, q>, so the scale to choose is the one whose q has the largest gain
<w, q>^2 / <q, q>. Each candidate scale maps the value of largest magnitude near the negative end of
the integers, which reach one further there (-8..7); s may be negative. Two rounds of least squares,
from s to q and back, follow the search.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from export.packed import F32, pack_codes

CHUNK_VALUES = 1 << 16  # searched at once: so many fit a core's cache
# candidates, by bits: by how much the largest value lies beyond the integers' negative end
STRETCH = {4: np.linspace(-0.15, 0.45, 19), 8: np.linspace(-0.01, 0.03, 5)}


@dataclass(frozen=True)
class Quantized:
    """Quantized rows, and the errors of the quantization.

    packed: (R, C * bits / 32).  scales: (R, C / group_size).  square_sum, error_sum: of the squares
    of the values and of the errors.  error_max: the largest error's magnitude.
    """

    packed: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    square_sum: float
    error_sum: float
    error_max: float


def quantize_rows(w: F32, bits: int, group_size: int, threads: int = 2) -> Quantized:
    """Quantize rows (R, C) of finite values; `group_size` must divide C.

    Returns MLX's layout: w is about scale * (q - 2**(bits - 1)), with q unsigned. A scale that is
    too large for float16 is infinite.
    """
    rows, columns = w.shape
    groups = np.ascontiguousarray(w).reshape(-1, group_size)
    step = max(1, CHUNK_VALUES // group_size)
    starts = range(0, len(groups), step)
    codes = np.empty(groups.shape, np.uint8)
    scales = np.empty(len(groups), np.float16)

    def work(start: int) -> tuple[float, float, float]:
        with np.errstate(over="ignore", invalid="ignore"):  # seen as infinite scales
            return quantize(start)

    def quantize(start: int) -> tuple[float, float, float]:
        part = groups[start : start + step]
        q, s = _search(part, bits)
        codes[start : start + step] = (q + 2 ** (bits - 1)).astype(np.uint8)
        scales[start : start + step] = s
        error = part - q * s.astype(np.float32)[:, None]
        squares = float(np.square(part, dtype=np.float64).sum())
        errors = float(np.square(error, dtype=np.float64).sum())
        return squares, errors, float(np.abs(error).max(initial=0.0))

    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(work, starts))
    return Quantized(
        pack_codes(codes.reshape(rows, columns), bits),
        scales.reshape(rows, columns // group_size),
        sum(s[0] for s in sums),
        sum(s[1] for s in sums),
        max((s[2] for s in sums), default=0.0),
    )


def _search(w: F32, bits: int) -> tuple[F32, npt.NDArray[np.float16]]:
    """The integers (G, group_size), as float32, and scales (G,) of least squared error."""
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
    scales = best_scale.astype(np.float16)
    exact = scales.astype(np.float32)
    inverse = np.divide(1, exact, out=np.zeros_like(exact), where=exact != 0)
    np.multiply(w, inverse[:, None], out=q)
    np.rint(q, out=q)
    np.clip(q, low, high, out=q)
    return q, scales
