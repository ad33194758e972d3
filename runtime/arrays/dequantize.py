"""Frozen matrices to float32, a tile at a time, with vector operations of a CPU.

Values in floating point are converted; packed integers are dequantized.

Even columns are the low halves of each byte, odd ones the high halves; they are dequantized to
separate matrices, and products take x split likewise. Flipping the top bit of each code gives two's
complement; masking it in place of shifting leaves 16 times the value, which the scale absorbs.
"""

from __future__ import annotations

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.weight_source import FloatTile, QuantizedTile, Tile

EVEN, ODD = (slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))
HIGH, FLIP4, FLIP8 = 0xF0F0F0F0, 0x88888888, 0x80808080
SIDE_BY_SIDE = 1 << 20  # values; of fewer a second stream costs what it saves


def _word(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint32)


def dequantize(tile: Tile, bits: int, arrays: Arrays) -> tuple[mx.array, ...]:
    """The columns of a tile as float32 matrices, without its `shift`.

    Returns (R, C/2) even and (R, C/2) odd columns for 4 bits, else one (R, C) matrix.
    """
    if isinstance(tile, FloatTile):
        values = tile.values.astype(mx.float32)
        arrays.settle(values)  # so that the stored values are freed before the product is allocated
        return (values,)
    if bits == 8:
        return (_scaled(tile.words ^ _word(FLIP8), tile.scales),)
    if tile.words.size * 8 < SIDE_BY_SIDE:
        return _low(tile), _high(tile)
    return arrays.both(lambda: _low(tile), lambda: _high(tile))


def _low(tile: QuantizedTile) -> mx.array:
    return _scaled(((tile.words ^ _word(FLIP4)) << 4) & _word(HIGH), tile.scales * (1 / 16))


def _high(tile: QuantizedTile) -> mx.array:
    return _scaled((tile.words ^ _word(FLIP4)) & _word(HIGH), tile.scales * (1 / 16))


def _scaled(words: mx.array, scales: mx.array) -> mx.array:
    rows, groups = scales.shape
    codes = words.view(mx.int8).reshape(rows, groups, -1)
    return (codes.astype(mx.float32) * scales[..., None]).reshape(rows, -1)


def split(x: mx.array, bits: int, arrays: Arrays) -> tuple[mx.array, ...]:
    """x (T, C) split into the column sets that `dequantize` returns, each contiguous."""
    if bits != 4:
        return (x,)
    return arrays.contiguous(x, EVEN), arrays.contiguous(x, ODD)


def join(parts: tuple[mx.array, ...], arrays: Arrays) -> mx.array:
    """The inverse of `split`: (T, C)."""
    if len(parts) == 1:
        return parts[0]
    even, odd = parts
    whole = mx.zeros((even.shape[0], 2 * even.shape[1]))
    arrays.settle(whole)
    arrays.put(whole, EVEN, even)
    arrays.put(whole, ODD, odd)
    return whole


def dense(tile: Tile, bits: int, arrays: Arrays) -> mx.array:
    """The tile's values (R, C) in order, float32."""
    values = join(dequantize(tile, bits, arrays), arrays)
    if isinstance(tile, FloatTile) or tile.shift is None:
        return values
    rows, groups = tile.scales.shape
    return (values.reshape(rows, groups, -1) + tile.shift[..., None]).reshape(rows, -1)
