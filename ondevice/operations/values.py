"""Shapes of the values that operations take and make; `T` stands for the number of tokens."""

from __future__ import annotations

import math

T = "T"
Dim = int | str
Shape = tuple[Dim, ...]
MOST_TILE_TOKENS, LEAST_TILE_TOKENS = 64, 16
F32 = 4  # bytes of a float32, which every value of a program is made of


def shape_at(shape: Shape, tokens: int) -> tuple[int, ...]:
    """The shape for so many tokens."""
    return tuple(tokens if dim == T else int(dim) for dim in shape)


def bytes_at(shape: Shape, tokens: int) -> int:
    """The bytes of a float32 value of this shape for so many tokens."""
    return math.prod(shape_at(shape, tokens)) * F32


def token_tile_unit(bucket: int) -> int:
    """The tokens that tiles of tokens are made of, where operations treat every token alike.

    The largest divisor of the sequence bucket that is at most `MOST_TILE_TOKENS`, or the bucket
    itself where there is none of a useful size.
    """
    unit = max(length for length in range(1, MOST_TILE_TOKENS + 1) if bucket % length == 0)
    return unit if unit >= LEAST_TILE_TOKENS else bucket


def token_axis(shape: Shape) -> int:
    """Which axis of a value is that of the tokens."""
    return shape.index(T)


def gradient_of(name: str) -> str:
    """What the gradient of the loss with respect to a value is called."""
    return f"~{name}"


def is_parameter(name: str) -> bool:
    """Whether an input is a small tensor of the weights file (`@name`) and no value."""
    return name.startswith("@")
