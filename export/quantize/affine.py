"""Scales and biases of least squared error for groups that are stored with both.

For a group w and given integers q the best scale is s = <w', q'> / <q', q'>, where w' and q' are w
and q less their means, and the best bias is mean(w) - s mean(q). They leave the error
|w'|^2 - <w', q'>^2 / <q', q'>, so the pair to choose is the one whose q has the largest gain
<w', q'>^2 / <q', q'>. Each candidate moves the smallest and the largest integer by some share of
the group's range inwards, or a little outwards. Two rounds of least squares, from s and the bias to
q and back, follow the search. Where rounding the stored numbers has made the pair worse than the
group's plain range, that range is taken.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from export.stored import F32

Floats = npt.NDArray[np.floating[Any]]

# candidates, by bits: shares of the range by which an end moves inwards
SHRINK = {4: np.linspace(-0.02, 0.11, 5), 8: np.linspace(-0.003, 0.006, 3)}
TINY = np.float32(1e-30)  # a smaller range counts as none
COARSE = 0.25  # in steps of the scale: from here on, rounding the stored numbers hurts


def fit(w: F32, bits: int, dtype: npt.DTypeLike) -> tuple[Floats, Floats]:
    """The scales and biases (G,), of type `dtype`, for groups w (G, group_size).

    Scales or biases that are too large for their type are infinite.
    """
    levels, half = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))
    size = w.shape[1]
    mean = w.mean(axis=1, dtype=np.float32)
    low = w.min(axis=1) - mean
    span = w.max(axis=1) - mean - low
    safe = np.where(span < TINY, np.float32(1), span)
    centred = w - mean[:, None]
    best_gain = np.full(len(w), -1, np.float32)
    best_scale = np.zeros(len(w), np.float32)
    best_centre = np.zeros(len(w), np.float32)  # what the integer `half` stands for
    q = np.empty_like(w)

    def try_scales(inverse: F32, offset: F32) -> None:
        np.multiply(centred, inverse[:, None], out=q)
        np.add(q, offset[:, None], out=q)
        np.rint(q, out=q)
        np.clip(q, -half, half - 1, out=q)  # about zero, sums keep more digits
        along = np.einsum("gk,gk->g", centred, q)
        total = np.einsum("gk->g", q)
        square = np.einsum("gk,gk->g", q, q) - total * total / size
        scale = np.divide(along, square, out=np.zeros_like(along), where=square > 0.5)
        gain = along * scale
        better = gain > best_gain
        best_gain[better] = gain[better]
        best_scale[better] = scale[better]
        best_centre[better] = (-scale * total / size)[better]

    for down, up in product(SHRINK[bits], repeat=2):
        inverse = (levels / (safe * np.float32(1 - down - up))).astype(np.float32)
        try_scales(inverse, -(low + np.float32(down) * span) * inverse - half)
    for _ in range(2):
        inverse = np.divide(1, best_scale, out=np.zeros_like(best_scale), where=best_scale != 0)
        try_scales(inverse, -best_centre * inverse)
    scales = best_scale.astype(dtype)
    exact = scales.astype(np.float32)
    inverse = np.divide(1, exact, out=np.zeros_like(exact), where=exact != 0)
    np.multiply(centred - best_centre[:, None], inverse[:, None], out=q)
    np.clip(np.rint(q + half), 0, levels, out=q)
    bias = mean - exact * q.mean(axis=1, dtype=np.float32)
    biases = bias.astype(dtype)
    lost = np.abs(biases.astype(np.float32) - bias) + np.abs(exact - best_scale) * half
    coarse = np.flatnonzero((lost > COARSE * np.abs(exact)) & np.isfinite(exact + biases))
    if len(coarse):
        scales[coarse], biases[coarse] = _fit_stored(
            w[coarse], scales[coarse], biases[coarse], levels
        )
    plain_scales = (span / levels).astype(dtype)
    plain_biases = w.min(axis=1).astype(dtype)
    usable = np.isfinite(scales) & np.isfinite(biases)
    usable &= np.isfinite(plain_scales) & np.isfinite(plain_biases)
    rows = np.flatnonzero(usable)
    mine = _errors(w[rows], scales[rows], biases[rows], levels)
    better = rows[_errors(w[rows], plain_scales[rows], plain_biases[rows], levels) < mine]
    scales[better], biases[better] = plain_scales[better], plain_biases[better]
    # where values are too large, the gain is not a number, or a sum is infinite
    beyond = (best_gain < 0) | ~np.isfinite(scales) | ~np.isfinite(biases)
    scales[beyond] = biases[beyond] = np.inf
    return scales, biases


def _fit_stored(
    w: F32, scales: Floats, biases: Floats, levels: np.float32
) -> tuple[Floats, Floats]:
    """Better scales and biases (G,) among those that their type can hold.

    Their rounding is large beside the steps of these groups: all values are nearly equal, or the
    scale is subnormal. The bias stays or moves to a neighbour, and the scale is fitted to it.
    """
    best = _errors(w, scales, biases, levels)
    found_scales, found_biases = scales.copy(), biases.copy()
    for bias in (biases, np.nextafter(biases, -np.inf), np.nextafter(biases, np.inf)):
        rest = w - bias.astype(np.float32)[:, None]
        peak = np.take_along_axis(rest, np.abs(rest).argmax(axis=1)[:, None], axis=1)[:, 0]
        start = peak / levels
        for _ in range(3):
            middle = start.astype(scales.dtype)
            for scale in (middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)):
                errors = _errors(w, scale, bias, levels)
                better = errors < best
                best[better] = errors[better]
                found_scales[better], found_biases[better] = scale[better], bias[better]
            q = _rounded(rest, start, levels)
            square = np.einsum("gk,gk->g", q, q)
            start = np.einsum("gk,gk->g", rest, q) / np.maximum(square, np.float32(1))
    return found_scales, found_biases


def _rounded(rest: F32, scale: F32, levels: np.float32) -> F32:
    """The integers (G, group_size) nearest to `rest` over `scale` (G,)."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint(rest * inverse[:, None]), 0, levels).astype(np.float32)


def _errors(w: F32, scales: Floats, biases: Floats, levels: np.float32) -> F32:
    """The squared errors (G,) of groups at these scales and biases; not a number is infinite."""
    scale = scales.astype(np.float32)
    rest = w - biases.astype(np.float32)[:, None]
    error = rest - scale[:, None] * _rounded(rest, scale, levels)
    errors = np.einsum("gk,gk->g", error, error)
    return np.where(np.isfinite(errors), errors, np.float32(np.inf)).astype(np.float32)
