"""Scales and biases of least squared error for groups of weights.

Groups stored with a scale and a bias (`fit_affine`): for a group w and given integers q the best
scale is s = <w', q'> / <q', q'>, where w' and q' are w and q less their means, and the best bias is
mean(w) - s mean(q). They leave the error |w'|^2 - <w', q'>^2 / <q', q'>, so the pair to choose is
the one whose q has the largest gain <w', q'>^2 / <q', q'>. Each candidate moves the smallest and
the largest integer by some share of the group's range inwards, or a little outwards. Where rounding
the stored numbers has made the pair worse than the group's plain range, that range is taken.

Groups stored with a scale alone (`fit_symmetric`): the same without means. The best scale is
<w, q> / <q, q>, and the gain is <w, q>^2 / <q, q>. Each candidate scale maps the value of largest
magnitude near the negative end of the integers, which reach one further there (-8..7); s may be
negative.

Two rounds of least squares, from s and the bias to q and back, follow either search.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from export.stored import F32

Floats = npt.NDArray[np.floating[Any]]

# candidates of affine groups, by bits: shares of the range by which an end moves inwards
SHRINK = {4: np.linspace(-0.02, 0.11, 5), 8: np.linspace(-0.003, 0.006, 3)}
# of symmetric ones: by how much the largest value lies beyond the integers' negative end
STRETCH = {4: np.linspace(-0.15, 0.45, 19), 8: np.linspace(-0.01, 0.03, 5)}
ROUNDS = 2  # of least squares
TINY = np.float32(1e-30)  # a smaller range counts as none
COARSE = 0.25  # in steps of the scale: from here on, rounding the stored numbers hurts


def inverse_of(scales: F32) -> F32:
    """1 / scales, and 0 where a scale is 0."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def fit_symmetric(w: F32, bits: int, dtype: npt.DTypeLike) -> tuple[Floats, None]:
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
    for _ in range(ROUNDS):
        try_scales(inverse_of(best_scale))
    best_scale[best_gain < 0] = np.inf  # the gain is not a number: too large
    return best_scale.astype(dtype), None


def fit_affine(w: F32, bits: int, dtype: npt.DTypeLike) -> tuple[Floats, Floats]:
    """The scales and biases (G,), of type `dtype`, for groups w (G, group_size).

    Scales or biases that are too large for their type are infinite.
    """
    levels = np.float32(2**bits - 1)
    mean = w.mean(axis=1, dtype=np.float32)
    low = w.min(axis=1) - mean
    span = w.max(axis=1) - mean - low
    centred = w - mean[:, None]
    best = _search_affine(centred, low, span, bits)
    scales, biases, is_coarse = _stored_numbers(centred, mean, best, bits, dtype)
    coarse = np.flatnonzero(is_coarse)
    if len(coarse):
        scales[coarse], biases[coarse] = _fit_stored(
            w[coarse], scales[coarse], biases[coarse], levels
        )
    _take_better_ranges(w, (span / levels).astype(dtype), scales, biases, levels)
    # where values are too large, the gain is not a number, or a sum is infinite
    beyond = (best.gain < 0) | ~np.isfinite(scales) | ~np.isfinite(biases)
    scales[beyond] = biases[beyond] = np.inf
    return scales, biases


@dataclass
class _BestPairs:
    """The best scales tried so far for groups less their means, all (G,).

    centre: the value for which the integer 2**(bits - 1) stands.
    """

    gain: F32
    scale: F32
    centre: F32

    def try_scales(self, centred: F32, inverse: F32, offset: F32, half: np.float32, q: F32) -> None:
        """Take each scale 1 / `inverse` whose gain is larger; q (G, group_size) is overwritten."""
        np.multiply(centred, inverse[:, None], out=q)
        np.add(q, offset[:, None], out=q)
        np.rint(q, out=q)
        np.clip(q, -half, half - 1, out=q)  # about zero, sums lose fewer digits
        along = np.einsum("gk,gk->g", centred, q)
        total = np.einsum("gk->g", q)
        square = np.einsum("gk,gk->g", q, q) - total * total / centred.shape[1]
        scale = np.divide(along, square, out=np.zeros_like(along), where=square > 0.5)
        gain = along * scale
        better = gain > self.gain
        self.gain[better] = gain[better]
        self.scale[better] = scale[better]
        self.centre[better] = (-scale * total / centred.shape[1])[better]


def _search_affine(centred: F32, low: F32, span: F32, bits: int) -> _BestPairs:
    """The best pairs for groups less their means; `low` and `span` (G,) are their ranges."""
    levels, half = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))
    safe = np.where(span < TINY, np.float32(1), span)
    zeros = np.zeros(len(centred), np.float32)
    best = _BestPairs(np.full(len(centred), -1, np.float32), zeros, zeros.copy())
    q = np.empty_like(centred)
    for down, up in product(SHRINK[bits], repeat=2):
        inverse = (levels / (safe * np.float32(1 - down - up))).astype(np.float32)
        offset = -(low + np.float32(down) * span) * inverse - half
        best.try_scales(centred, inverse, offset, half, q)
    for _ in range(ROUNDS):
        inverse = inverse_of(best.scale)
        best.try_scales(centred, inverse, -best.centre * inverse, half, q)
    return best


def _stored_numbers(
    centred: F32, mean: F32, best: _BestPairs, bits: int, dtype: npt.DTypeLike
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Scales and biases (G,) in their type, and where rounding to it hurts.

    The bias is fitted to the rounded scale.
    """
    levels, half = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))
    scales = best.scale.astype(dtype)
    rounded = scales.astype(np.float32)
    q = (centred - best.centre[:, None]) * inverse_of(rounded)[:, None]
    np.clip(np.rint(q + half), 0, levels, out=q)
    bias = mean - rounded * q.mean(axis=1, dtype=np.float32)
    biases = bias.astype(dtype)
    lost = np.abs(biases.astype(np.float32) - bias) + np.abs(rounded - best.scale) * half
    return scales, biases, (lost > COARSE * np.abs(rounded)) & np.isfinite(rounded + biases)


def _take_better_ranges(
    w: F32, plain_scales: Floats, scales: Floats, biases: Floats, levels: np.float32
) -> None:
    """Replace scales and biases where the group's plain range has a smaller error."""
    plain_biases = w.min(axis=1).astype(scales.dtype)
    usable = np.isfinite(scales) & np.isfinite(biases)
    usable &= np.isfinite(plain_scales) & np.isfinite(plain_biases)
    rows = np.flatnonzero(usable)
    errors = _errors(w[rows], scales[rows], biases[rows], levels)
    better = rows[_errors(w[rows], plain_scales[rows], plain_biases[rows], levels) < errors]
    scales[better], biases[better] = plain_scales[better], plain_biases[better]


def _fit_stored(
    w: F32, scales: Floats, biases: Floats, levels: np.float32
) -> tuple[Floats, Floats]:
    """Better scales and biases (G,) among those that their type can hold.

    Their rounding is large beside the steps of these groups: all values are nearly equal, or the
    scale is subnormal. The bias stays or moves to a neighbour, and the scale is fitted to it.
    """
    best_errors = _errors(w, scales, biases, levels)
    best_scales, best_biases = scales.copy(), biases.copy()
    for bias in (biases, np.nextafter(biases, -np.inf), np.nextafter(biases, np.inf)):
        shifted = w - bias.astype(np.float32)[:, None]
        peak = np.take_along_axis(shifted, np.abs(shifted).argmax(axis=1)[:, None], axis=1)[:, 0]
        start = peak / levels
        for _ in range(3):
            middle = start.astype(scales.dtype)
            for scale in (middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)):
                errors = _errors(w, scale, bias, levels)
                better = errors < best_errors
                best_errors[better] = errors[better]
                best_scales[better], best_biases[better] = scale[better], bias[better]
            q = _rounded(shifted, start, levels)
            square = np.einsum("gk,gk->g", q, q)
            start = np.einsum("gk,gk->g", shifted, q) / np.maximum(square, np.float32(1))
    return best_scales, best_biases


def _rounded(shifted: F32, scale: F32, levels: np.float32) -> F32:
    """The integers (G, group_size) nearest to `shifted` over `scale` (G,)."""
    nearest = np.rint(shifted * inverse_of(scale)[:, None])
    integers: F32 = np.clip(nearest, 0, levels).astype(np.float32)
    return integers


def _errors(w: F32, scales: Floats, biases: Floats, levels: np.float32) -> F32:
    """The squared errors (G,) of groups at these scales and biases; infinite for NaN."""
    scale = scales.astype(np.float32)
    shifted = w - biases.astype(np.float32)[:, None]
    error = shifted - scale[:, None] * _rounded(shifted, scale, levels)
    errors = np.einsum("gk,gk->g", error, error)
    return np.where(np.isfinite(errors), errors, np.float32(np.inf)).astype(np.float32)
