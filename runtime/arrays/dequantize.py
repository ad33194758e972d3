"""Frozen matrices to float32, a tile at a time.

Values in floating point are converted; packed integers are dequantized. Flipping the top bit of
each code gives two's complement. Of 4 bits, the halves of a byte go to the high halves of two
bytes: that leaves 16 times the value, which the scale absorbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.weight_source import FloatTile, Tile

if TYPE_CHECKING:
    from runtime.arrays.arrays import Arrays

FLIP = {4: 0x88888888, 8: 0x80808080}
HIGH = 0xF0F0
ABSORBED = {4: 1 / 16, 8: 1.0}  # by the scale


def dequantize(tile: Tile, bits: int, arrays: Arrays) -> mx.array:
    """The values (R, C) of a tile as float32, without its `shift`; lazy if they are packed."""
    if isinstance(tile, FloatTile):
        values = tile.values.astype(mx.float32)
        arrays.settle(values)  # so that the stored values are freed before the product is allocated
        return values
    scales = tile.scales * ABSORBED[bits]
    signed = arrays.codes(tile.words, bits).reshape(*scales.shape, -1)
    return (signed.astype(mx.float32) * scales[..., None]).reshape(len(scales), -1)


def codes(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.int8]:
    """The signed codes (R, C) of words (R, C*bits/32), 16 times as large if they have 4 bits.

    By NumPy, which is twice as fast here as MLX on a CPU.
    """
    flipped = (words ^ np.uint32(FLIP[bits])).view(np.uint8)
    if bits == 8:
        return flipped.view(np.int8)
    pairs = flipped.astype(np.uint16)
    lifted = pairs << 8
    np.left_shift(pairs, 4, out=pairs)
    np.bitwise_or(pairs, lifted, out=pairs)
    np.bitwise_and(pairs, np.uint16(HIGH), out=pairs)
    return pairs.view(np.int8)


def lazy_codes(words: mx.array, bits: int) -> mx.array:
    """The same by MLX's operations, on any device."""
    flipped = (words ^ mx.array(FLIP[bits], mx.uint32)).view(mx.uint8)
    if bits == 4:
        pairs = flipped.astype(mx.uint16)
        flipped = ((pairs << 4) | (pairs << 8)) & mx.array(HIGH, mx.uint16)
    return flipped.view(mx.int8)


def dense(tile: Tile, bits: int, arrays: Arrays) -> mx.array:
    """The tile's values (R, C), float32."""
    values = dequantize(tile, bits, arrays)
    if isinstance(tile, FloatTile) or tile.shift is None:
        return values
    rows, groups = tile.scales.shape
    return (values.reshape(rows, groups, -1) + tile.shift[..., None]).reshape(rows, -1)
