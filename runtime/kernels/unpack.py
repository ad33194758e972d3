"""Packed integers to float32, a tile at a time, at several G values/s on a CPU.

Even columns are the low halves of each byte, odd ones the high halves; they are unpacked to
separate matrices, and products take x split likewise. Flipping the top bit of each code gives two's
complement; masking it in place of shifting leaves 16 times the value, which the scale absorbs.
"""

from __future__ import annotations

import mlx.core as mx

from runtime.weights import Tile

HIGH, FLIP4, FLIP8 = 0xF0F0F0F0, 0x88888888, 0x80808080


def _word(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint32)


def unpack(tile: Tile, bits: int) -> tuple[mx.array, ...]:
    """The columns of a tile as float32 matrices, without its `shift`.

    Returns (R, C/2) even and (R, C/2) odd columns for 4 bits, one (R, C) matrix for 8.
    """
    if bits == 8:
        return (_scaled(tile.words ^ _word(FLIP8), tile.scales),)
    flipped = tile.words ^ _word(FLIP4)
    scales = tile.scales * (1 / 16)
    low = (flipped << 4) & _word(HIGH)
    return _scaled(low, scales), _scaled(flipped & _word(HIGH), scales)


def _scaled(words: mx.array, scales: mx.array) -> mx.array:
    rows, groups = scales.shape
    codes = words.view(mx.int8).reshape(rows, groups, -1)
    return (codes.astype(mx.float32) * scales[..., None]).reshape(rows, -1)


def split(x: mx.array, bits: int) -> tuple[mx.array, ...]:
    """x (T, C) as the column sets that `unpack` yields, each contiguous."""
    if bits == 8:
        return (x,)
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs[..., 0] + 0.0, pairs[..., 1] + 0.0


def join(parts: tuple[mx.array, ...]) -> mx.array:
    """The inverse of `split`: (T, C)."""
    if len(parts) == 1:
        return parts[0]
    return mx.stack(list(parts), axis=-1).reshape(parts[0].shape[0], -1)


def dense(tile: Tile, bits: int) -> mx.array:
    """The tile's values (R, C) in order, float32."""
    values = join(unpack(tile, bits))
    if tile.shift is None:
        return values
    rows, groups = tile.scales.shape
    return (values.reshape(rows, groups, -1) + tile.shift[..., None]).reshape(rows, -1)


def group_sums(x: mx.array, groups: int) -> mx.array:
    """Sums of x (T, C) over each group of columns: (T, G)."""
    return x.reshape(x.shape[0], groups, -1).sum(axis=-1)
