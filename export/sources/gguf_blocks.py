"""GGUF's quantized blocks in the bundle's form, with the same values or the nearest.

GGUF has 32 values in a block with one scale, or, in the K types, 256 with a scale for each 16 or
32. The scales of the K types are products: a float16 of the block times a small integer of the
group. They are rounded to float16. That changes the values of Q4_K and Q5_K by 7e-4 of their size,
where integers of 4 and 5 bits had changed them by about 8e-2 and 4e-2. With float32 nothing would
change, but Q4_K would take 6 bits for a weight instead of 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from export.stored import F32, QuantizedForm, QuantizedRows, words_of

CHUNK_VALUES = 1 << 16  # converted at once: so many fit a core's cache
Octets = npt.NDArray[np.uint8]
_NIBBLES = np.array([0, 4], np.uint8)[:, None]
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]


class _Groups(NamedTuple):
    """The groups of N blocks: codes (N, V), scales and biases (N, groups of a block)."""

    codes: Octets
    scales: F32
    biases: F32 | None = None


@dataclass(frozen=True)
class Transcoding:
    """The stored form of blocks of one type: `groups` reads blocks (N, bytes of a block).

    `is_exact` says whether the values remain the same bit for bit.
    """

    form: QuantizedForm
    is_exact: bool
    groups: Callable[[Octets], _Groups]


def transcode(rows: Octets, type_: GGMLQuantizationType) -> QuantizedRows:
    """Rows (R, bytes of a row) of a type that has a transcoding, as a bundle stores them."""
    transcoding = TRANSCODINGS[type_]
    values, octets = GGML_QUANT_SIZES[type_]
    blocks = rows.reshape(-1, octets)
    words = np.empty((len(blocks), values * transcoding.form.bits // 32), np.uint32)
    scales = np.empty((len(blocks), values // transcoding.form.group_size), np.float16)
    biases = np.empty_like(scales) if transcoding.form.layout == "affine" else None
    step = max(1, CHUNK_VALUES // values)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        groups = transcoding.groups(blocks[part])
        words[part] = words_of(groups.codes, transcoding.form.bits)
        with np.errstate(over="ignore"):  # infinite where it is too large, as in a damaged file
            scales[part] = groups.scales
            if biases is not None:
                biases[part] = groups.biases
    count = len(rows)
    return QuantizedRows(
        words.reshape(count, -1),
        scales.reshape(count, -1),
        None if biases is None else biases.reshape(count, -1),
    )


def _floats(blocks: Octets, start: int) -> F32:
    """The float16 that stands at byte `start` of each block, (N, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(octets: Octets, run: int) -> Octets:
    """Codes (N, 2 * W) of octets (N, W): of each `run` octets the low halves, then the high."""
    halves = octets.reshape(len(octets), -1, 1, run) >> _NIBBLES
    return (halves & np.uint8(15)).reshape(len(octets), -1)


def _fifth_bits(octets: Octets) -> Octets:
    """16 or 0 for each of the 32 bits in octets (N, 4)."""
    return np.unpackbits(octets, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Octets) -> _Groups:
    return _Groups(_nibbles(blocks[:, 2:], 16), _floats(blocks, 0))


def _q4_1(blocks: Octets) -> _Groups:
    return _Groups(_nibbles(blocks[:, 4:], 16), _floats(blocks, 0), _floats(blocks, 2))


def _q5_0(blocks: Octets) -> _Groups:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _Groups(codes + np.uint8(128 - 16), _floats(blocks, 0))


def _q5_1(blocks: Octets) -> _Groups:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _Groups(codes, _floats(blocks, 0), _floats(blocks, 2))


def _q8_0(blocks: Octets) -> _Groups:
    return _Groups(blocks[:, 2:] ^ np.uint8(128), _floats(blocks, 0))


def _q2_k(blocks: Octets) -> _Groups:
    """The nearest symmetric 8 bits: two groups of 16, each with a minimum, rarely fit one of 32."""
    values = dequantize(blocks, GGMLQuantizationType.Q2_K).reshape(len(blocks), -1, 32)
    scales = (np.abs(values).max(axis=2) / 127).astype(np.float16).astype(np.float32)
    steps = np.where(scales == 0, np.float32(1), scales)[..., None]
    codes = np.clip(np.rint(values / steps), -128, 127) + 128
    return _Groups(codes.astype(np.uint8).reshape(len(blocks), -1), scales)


def _q3_k(blocks: Octets) -> _Groups:
    """Exact: -32..31 of a group's scale times -4..3 fit 8 bits, in units of minus the block's."""
    unit = blocks.copy()
    unit[:, 108:] = np.array([1], "<f2").view(np.uint8)
    products = dequantize(unit, GGMLQuantizationType.Q3_K)  # -124..128
    scales = np.repeat(-_floats(blocks, 108), 2, axis=1)
    return _Groups((128 - products).astype(np.uint8), scales)


def _of_scales_and_minima(blocks: Octets, codes: Octets) -> _Groups:
    """Groups of Q4_K and Q5_K: d and dmin, then 6 bits of each for every group of 32."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _Groups(codes, _floats(blocks, 0) * scales, -_floats(blocks, 2) * minima)


def _q4_k(blocks: Octets) -> _Groups:
    return _of_scales_and_minima(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Octets) -> _Groups:
    fifth = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)  # (N, 32, 8)
    high = fifth.swapaxes(1, 2).reshape(len(blocks), -1) << np.uint8(4)
    return _of_scales_and_minima(blocks, _nibbles(blocks[:, 48:], 32) | high)


def _q6_k(blocks: Octets) -> _Groups:
    """The nearest symmetric 8 bits, exact where the scales of two groups of 16 allow it.

    A value is d times an integer, its group's scale times -32..31. Each step that is tried makes
    one of the two groups exact, or both: a fraction of one's scale, or a divisor of both scales.
    The smallest step that reaches all values is tried too, so that no other one is taken which is
    worse than plain rounding.
    """
    halves = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> _PAIRS
    high = (halves & np.uint8(3)).reshape(len(blocks), -1) << np.uint8(4)
    signed = (_nibbles(blocks[:, :128], 64) | high).view(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    products = signed.reshape(-1, 16) * factors.reshape(-1, 1)
    codes, steps = _whole_steps(products.reshape(-1, 32), np.abs(factors.reshape(-1, 2)))
    scales = steps.reshape(len(blocks), -1) * _floats(blocks, 208)
    return _Groups(codes.reshape(len(blocks), -1), scales)


def _whole_steps(values: F32, factors: F32) -> tuple[Octets, F32]:
    """Codes (G, 32) and steps (G,) near integers (G, 32) = code * step.

    The first 16 values of a group are multiples of factors[:, 0], the others of factors[:, 1].
    """
    low, high = values.min(axis=1), values.max(axis=1)
    signs = np.where(high > -low, np.float32(-1), np.float32(1))  # -128 reaches further than 127
    values = values * signs[:, None]
    least = np.maximum(np.maximum(high, -low) / 128, np.minimum(high, -low) / 127)
    tried = [np.gcd(*factors.T.astype(np.int32)).astype(np.float32), least]
    with np.errstate(divide="ignore", invalid="ignore"):  # no fraction of this scale is a step
        tried += [factor / np.floor(factor / least) for factor in factors.T]
    best = np.full(len(values), np.inf, np.float32)
    steps = np.ones(len(values), np.float32)
    for step in tried:
        fits = np.isfinite(step) & (step >= least * (1 - 1e-6)) & (step > 0)
        usable = np.where(fits, step, np.float32(1))
        error = values - np.rint(values / usable[:, None]) * usable[:, None]
        squares = np.where(fits, np.einsum("gk,gk->g", error, error), np.inf)
        better = squares < best
        best[better], steps[better] = squares[better], usable[better]
    codes = np.clip(np.rint(values / steps[:, None]), -128, 127) + 128
    return codes.astype(np.uint8), steps * signs


_AFFINE = QuantizedForm(4, 32, "affine", "float16")
_SYMMETRIC = QuantizedForm(8, 32, "symmetric", "float16")
# the types that a bundle stores as integers; floats and types with a codebook are not among them
TRANSCODINGS = {
    GGMLQuantizationType.Q4_0: Transcoding(replace(_SYMMETRIC, bits=4), True, _q4_0),
    GGMLQuantizationType.Q4_1: Transcoding(_AFFINE, True, _q4_1),
    GGMLQuantizationType.Q5_0: Transcoding(_SYMMETRIC, True, _q5_0),
    GGMLQuantizationType.Q5_1: Transcoding(replace(_AFFINE, bits=8), True, _q5_1),
    GGMLQuantizationType.Q8_0: Transcoding(_SYMMETRIC, True, _q8_0),
    GGMLQuantizationType.Q2_K: Transcoding(_SYMMETRIC, False, _q2_k),
    GGMLQuantizationType.Q3_K: Transcoding(replace(_SYMMETRIC, group_size=128), True, _q3_k),
    GGMLQuantizationType.Q4_K: Transcoding(_AFFINE, False, _q4_k),
    GGMLQuantizationType.Q5_K: Transcoding(replace(_AFFINE, bits=8), False, _q5_k),
    GGMLQuantizationType.Q6_K: Transcoding(_SYMMETRIC, False, _q6_k),
}
