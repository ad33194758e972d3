"""Whether a glue function treats every token alike: then it can run a tile of tokens at a time.

Norms, activations and residuals do; rotary embeddings depend on the position. The question is put
to the function itself: what it makes of all tokens must be what it makes of either half.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from export.cut.trace import Function
from ondevice.operations.values import Shape, T, shape_at, token_axis

TRIAL_TOKENS = 8


def treats_tokens_alike(
    function: Function, inputs: Sequence[str], outputs: Sequence[str], shapes: dict[str, Shape]
) -> bool:
    """Whether the function over all tokens is itself over any part of them, on random values."""
    if any(shapes[name].count(T) != 1 for name in (*outputs, *inputs) if name[0] != "@"):
        return False
    tokens = 2 * TRIAL_TOKENS
    keys = mx.random.split(mx.random.key(0), len(inputs))
    drawn = [
        mx.random.normal(shape_at(shapes[name], tokens), key=key)
        for name, key in zip(inputs, keys, strict=True)
    ]
    whole = function(*drawn)
    for start in (0, TRIAL_TOKENS):
        where = slice(start, start + TRIAL_TOKENS)
        part = function(
            *(
                array if name[0] == "@" else array[_along(shapes[name], where)]
                for name, array in zip(inputs, drawn, strict=True)
            )
        )
        for name, one, all_ in zip(outputs, part, whole, strict=True):
            if not mx.allclose(one, all_[_along(shapes[name], where)], 1e-4, 1e-5).item():
                return False
    return True


def _along(shape: Shape, tokens: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * token_axis(shape), tokens)
