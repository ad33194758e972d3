"""Whether glue is a gated activation, f(g) * u, for which a runtime has a kernel of its own.

As with `treats_tokens_alike`, the function itself is asked: its values and its gradients must be
those of MLX's own activation, on random values. GELU and its tanh form differ by up to 5e-4.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from export.cut.trace import Function
from ondevice.operations.elementwise import Activation

ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
}
SPREAD = 10.0  # of g: far into both flat ends of f


def gated_activation(forward: Function, vjp: Function, shape: tuple[int, ...]) -> Activation:
    """The activation f, where `forward` is f(g) * u of (g, u); "" where it is none of these.

    Args:
        forward: takes (g, u), each of `shape`, and returns one array of it.
        vjp: takes (g, u, dy) and returns the gradients of g and u.
    """
    keys = mx.random.split(mx.random.key(0), 3)
    g, u, dy = (mx.random.normal(shape, key=key) for key in keys)
    g = SPREAD * g
    found = [*forward(g, u), *vjp(g, u, dy)]
    for name, activation in ACTIVATIONS.items():
        values, gradients = mx.vjp(_gate(activation), [g, u], [dy])
        expected = [*values, *gradients]
        if all(mx.allclose(a, b, 1e-4, 1e-5).item() for a, b in zip(found, expected, strict=True)):
            return name
    return ""


def _gate(activation: Callable[[mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    return lambda g, u: activation(g) * u
