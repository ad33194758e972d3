"""Dropout of adapter inputs: the same values are dropped whenever a token's mask is drawn.

    drop(x) = D * x / (1 - p)        D is 0 with probability p, else 1

A mask is drawn by a counter-based generator (Threefry, "Parallel random numbers: as easy as 1, 2,
3", 2011), whose key is that of one row and matrix with the token's position added. So it does not
depend on padding or on tiles of tokens, and a backward pass draws it again instead of storing it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

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

    def mask(self, tokens: int, columns: int) -> DropoutMask:
        """The mask of so many tokens."""
        dropped = min(round(self.probability * STEPS), STEPS - 1)
        remaining = _bits(self.key, self.first, tokens, columns) >= mx.array(dropped, mx.uint16)
        return DropoutMask(remaining, STEPS / (STEPS - dropped))


def _bits(key: int, first: int, tokens: int, columns: int) -> mx.array:
    """16 random bits for each value (tokens, columns), uint16."""
    keys = np.empty((tokens, 2), np.uint32)
    keys[:, 0] = key >> 32
    keys[:, 1] = ((key & WORD) + first + np.arange(tokens)) & WORD
    pairs = -(-columns // 4)  # of words
    words = mx.vmap(lambda token_key: mx.random.split(token_key, pairs))(mx.array(keys))
    bits: mx.array = words.reshape(tokens, 2 * pairs).view(mx.uint16)[:, :columns]
    return bits
