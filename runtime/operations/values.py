"""Shapes of the values that operations read and compute; `T` stands for the number of tokens."""

from __future__ import annotations

import math

T = "T"
Dim = int | str
Shape = tuple[Dim, ...]
MOST_TILE_TOKENS, LEAST_TILE_TOKENS = 64, 16
CHUNK_TOKENS = 16  # of a prompt, which are decoded at once
DECODED_TOKENS = (1, CHUNK_TOKENS)  # which graphs for decoding take
POSITION = "@position"  # of the first token decoded, an int32 (no program can name a value so)
COUNT = "@count"  # of the tokens decoded that are no padding, an int32
F32 = 4  # bytes of a float32
HUGE = 1e30  # a float32, as twice its reciprocal is


def shape_at(shape: Shape, tokens: int) -> tuple[int, ...]:
    """The shape with T replaced by a number of tokens."""
    return tuple(tokens if dim == T else int(dim) for dim in shape)


def bytes_at(shape: Shape, tokens: int, item_bytes: int = F32) -> int:
    """The bytes of a value of this shape, with T replaced by a number of tokens."""
    return math.prod(shape_at(shape, tokens)) * item_bytes


def token_tile_unit(bucket: int) -> int:
    """The number of tokens in the smallest tile, for operations that run by tiles of tokens.

    It is the largest divisor of the sequence bucket that is at most `MOST_TILE_TOKENS`, or the
    bucket itself if that divisor is below `LEAST_TILE_TOKENS`.
    """
    unit = max(tokens for tokens in range(1, MOST_TILE_TOKENS + 1) if bucket % tokens == 0)
    return unit if unit >= LEAST_TILE_TOKENS else bucket


def graph_key(graph: str, direction: str, tokens: int, dtype: str = "float32") -> str:
    """The key of a serialized function: `direction` is "forward", "vjp" or "decode"."""
    named = graph if dtype == "float32" else f"{graph}.{dtype}"
    return f"{named}.{direction}.{tokens}"


def dtype_of(key: str) -> str:
    """The type of values of the serialized function of this key."""
    return "bfloat16" if ".bfloat16." in key else "float32"


def token_axis(shape: Shape) -> int:
    """The index of the axis that runs over the tokens."""
    return shape.index(T)


def gradient_of(name: str) -> str:
    """The name of the gradient of the loss with respect to a value: `~name`."""
    return f"~{name}"


def is_parameter(name: str) -> bool:
    """Whether an input is a parameter, a small tensor of the weights file written as `@name`."""
    return name.startswith("@")
