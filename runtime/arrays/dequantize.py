"""Frozen matrices to float32, a tile at a time.

Values in floating point are converted; packed integers are dequantized. Flipping the top bit of
each code gives two's complement. Of 4 bits, the halves of a byte go to the high halves of two
bytes: that leaves 16 times the value, which the scale absorbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import CHUNK_VALUES
from runtime.arrays.weight_source import FloatTile, Tile

if TYPE_CHECKING:
    from runtime.arrays.arrays import Arrays

FLIP = {4: 0x88888888, 8: 0x80808080}
HIGH = 0xF0F0
ABSORBED = {4: 1 / 16, 8: 1.0}  # by the scale

Codes = npt.NDArray[np.int8]


def dequantize(tile: Tile, bits: int, arrays: Arrays) -> mx.array:
    """The values (R, C) of a tile as float32, without its `shift`."""
    if isinstance(tile, FloatTile):
        values = tile.values.astype(mx.float32)
        arrays.settle(values)  # so that the stored values are freed before the product is allocated
        return values
    return arrays.dequantized(tile.words, tile.scales, bits)


def codes(words: npt.NDArray[np.uint32], bits: int) -> Iterator[tuple[slice, Codes]]:
    """The signed codes of some rows after others, in order, 16 times as large if they have 4 bits.

    The array (r, C) is overwritten for the next rows.
    """
    octets = 4 * words.shape[1]
    step = max(1, CHUNK_VALUES // (octets * 8 // bits))
    for start in range(0, len(words), step):
        flipped = (words[start : start + step] ^ np.uint32(FLIP[bits])).view(np.uint8)
        rows = slice(start, start + len(flipped))
        if bits == 8:
            yield rows, flipped.view(np.int8)
            continue
        pairs = flipped.astype(np.uint16)
        lifted = pairs << 8
        np.left_shift(pairs, 4, out=pairs)
        np.bitwise_or(pairs, lifted, out=pairs)
        np.bitwise_and(pairs, np.uint16(HIGH), out=pairs)
        yield rows, pairs.view(np.int8)


def fill(
    values: npt.NDArray[np.float32],
    words: npt.NDArray[np.uint32],
    scales: npt.NDArray[np.float32],
    bits: int,
) -> None:
    """Dequantize words (R, C*bits/32) with scales (R, G) to `values` (R, C), on a CPU."""
    absorbing = scales * np.float32(ABSORBED[bits])
    grouped = values.reshape(*scales.shape, -1)
    for rows, of_rows in codes(words, bits):
        values[rows] = of_rows
        np.multiply(grouped[rows], absorbing[rows, :, None], out=grouped[rows])


def lazily(words: mx.array, scales: mx.array, bits: int) -> mx.array:
    """The same values by MLX's operations, on any device."""
    flipped = (words ^ mx.array(FLIP[bits], mx.uint32)).view(mx.uint8)
    if bits == 4:
        pairs = flipped.astype(mx.uint16)
        flipped = ((pairs << 4) | (pairs << 8)) & mx.array(HIGH, mx.uint16)
    rows, groups = scales.shape
    signed = flipped.view(mx.int8).reshape(rows, groups, -1).astype(mx.float32)
    return (signed * (scales * ABSORBED[bits])[..., None]).reshape(rows, -1)


def dense(tile: Tile, bits: int, arrays: Arrays) -> mx.array:
    """The tile's values (R, C), float32."""
    values = dequantize(tile, bits, arrays)
    if isinstance(tile, FloatTile) or tile.shift is None:
        return values
    rows, groups = tile.scales.shape
    return (values.reshape(rows, groups, -1) + tile.shift[..., None]).reshape(rows, -1)
