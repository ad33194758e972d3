"""Dropout of adapter inputs: the same values are dropped whenever a token's mask is drawn.

    drop(x) = D * x / (1 - p)        D is 0 with probability p, else 1

A mask is drawn by a counter-based generator (Threefry, "Parallel random numbers: as easy as 1, 2,
3", 2011), whose key is that of one row and matrix with the token's position added, and the number
of the block of columns. So it does not depend on padding or on slices of columns, and a backward
pass draws it again instead of storing it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from runtime.arrays.stored import DRAWN

STEPS = 1 << 16  # a value takes 16 random bits, so probabilities are multiples of 1 / STEPS
WORD = (1 << 32) - 1


@dataclass(frozen=True)
class DropoutMask:
    """Which values of an array (T, C) remain, and the factor of those; lazy."""

    remaining: mx.array  # (T, C), bool
    factor: float

    def __call__(self, x: mx.array) -> mx.array:
        """drop(x) (T, C); its own adjoint, so that gradients take it too."""
        return mx.where(self.remaining, x, 0.0) * self.factor


@dataclass(frozen=True)
class Dropout:
    """The dropout of one matrix's input in one row, from the token `first` on.

    `key` has 64 bits. `probability`, from 0 to below 1, is rounded to 1/65536.
    """

    key: int
    probability: float
    first: int = 0

    def after(self, tokens: int) -> Dropout:
        """The dropout after so many tokens."""
        return replace(self, first=self.first + tokens)

    def mask(self, tokens: int, columns: int, start: int = 0) -> DropoutMask:
        """The mask of so many tokens and columns, from the column `start` on."""
        dropped = min(round(self.probability * STEPS), STEPS - 1)
        bits = _bits(self.key, self.first, tokens, start, columns)
        remaining = bits >= mx.array(dropped, mx.uint16)
        return DropoutMask(remaining, STEPS / (STEPS - dropped))


def _bits(key: int, first: int, tokens: int, start: int, columns: int) -> mx.array:
    """16 random bits for each value (tokens, columns), uint16."""
    block = start // DRAWN
    blocks = np.arange(block, -(-(start + columns) // DRAWN))
    keys = np.empty((tokens, len(blocks), 2), np.uint32)
    keys[..., 0] = ((key >> 32) + blocks) & WORD
    keys[..., 1] = ((key & WORD) + first + np.arange(tokens)[:, None]) & WORD
    split = mx.vmap(lambda drawn: mx.random.split(drawn, DRAWN // 4))
    words = split(mx.array(keys.reshape(-1, 2)))
    bits: mx.array = words.reshape(tokens, -1).view(mx.uint16)
    before = start - block * DRAWN
    return bits[:, before : before + columns]
