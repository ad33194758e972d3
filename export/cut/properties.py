"""Properties of a traced function that let a runtime run it faster or in less memory.

There are two: the function may treat every token alike, so that it can run on a few tokens at a
time; and it may be a gated activation, for which a runtime has a kernel. Both are found by running
the function on random values, not by reading its graph: the spelling of a norm or an activation in
mlx-lm does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import mlx.nn as nn

from export.cut.trace import Function
from runtime.operations.elementwise import Activation
from runtime.operations.values import Shape, T, is_parameter, shape_at, token_axis

TRIAL_TOKENS = 8  # in each half of the sequence that the function is tried on
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # how close equal values are; GELU and its tanh form differ by 5e-4
GATE_SCALE = 10.0  # of the random values: they reach far into both flat ends of f

Gate = Callable[[mx.array, mx.array], mx.array]
GATES: dict[Activation, Gate] = {
    "silu": lambda g, u: nn.silu(g) * u,
    "gelu_tanh": lambda g, u: nn.gelu_approx(g) * u,
}


def treats_tokens_alike(
    function: Function, inputs: Sequence[str], outputs: Sequence[str], shapes: dict[str, Shape]
) -> bool:
    """Whether the function gives the same results for all tokens at once and for each half.

    Norms, activations and residual sums do; rotary embeddings depend on the position. `inputs` and
    `outputs` are names whose shapes are in `shapes`; a parameter, named `@name`, has no tokens.
    """
    return _by_halves(function, lambda _, given: function(*given), inputs, outputs, shapes)


def _by_halves(
    function: Function,
    half_of: Callable[[slice, Sequence[mx.array]], list[mx.array]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: dict[str, Shape],
) -> bool:
    """Whether `half_of` gives each half of the tokens the results of `function` for all."""
    if any(shapes[name].count(T) != 1 for name in (*outputs, *inputs) if not is_parameter(name)):
        return False
    keys = mx.random.split(mx.random.key(0), len(inputs))
    given = [
        mx.random.normal(shape_at(shapes[name], 2 * TRIAL_TOKENS), key=key)
        for name, key in zip(inputs, keys, strict=True)
    ]
    whole = function(*map(mx.array, given))  # of its own, since models may change them in place
    for start in (0, TRIAL_TOKENS):
        half = slice(start, start + TRIAL_TOKENS)
        parts = [
            array if is_parameter(name) else array[_of_tokens(shapes[name], half)]
            for name, array in zip(inputs, given, strict=True)
        ]
        results = half_of(half, parts)
        expected = (
            array[_of_tokens(shapes[name], half)]
            for name, array in zip(outputs, whole, strict=True)
        )
        if not _equal(results, expected):
            return False
    return True


def continues(
    forward: Function,
    decode: Function,
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: dict[str, Shape],
) -> bool:
    """Whether `decode` gives each half of a sequence, at its position, the results of the whole.

    It does if no token's results depend on other tokens. `decode` takes the inputs of `forward` and
    a position. For `inputs`, `outputs` and `shapes` see `treats_tokens_alike`.
    """

    def at(half: slice, given: Sequence[mx.array]) -> list[mx.array]:
        return decode(*given, mx.array(half.start, mx.int32))

    return _by_halves(forward, at, inputs, outputs, shapes)


def gated_activation(forward: Function, vjp: Function, shape: tuple[int, ...]) -> Activation:
    """The activation f if `forward` computes f(g) * u for (g, u), or "" if no known f does.

    Values and gradients must both be those of MLX's own f.

    Args:
        forward: takes (g, u), each of `shape`, and returns one array of it.
        vjp: takes (g, u, dy) and returns the gradients of g and u.
    """
    found = (name for name, gate in GATES.items() if computes(gate, forward, vjp, shape))
    return next(found, "")


def computes(gate: Gate, forward: Function, vjp: Function, shape: tuple[int, ...]) -> bool:
    """Whether `forward` and `vjp` compute values and gradients of a gate, see above."""
    keys = mx.random.split(mx.random.key(0), 3)
    g, u, dy = (mx.random.normal(shape, key=key) for key in keys)
    g, u = GATE_SCALE * g, GATE_SCALE * u
    values, gradients = mx.vjp(gate, [g, u], [dy])
    return _equal([*forward(g, u), *vjp(g, u, dy)], [*values, *gradients])


def _of_tokens(shape: Shape, tokens: slice) -> tuple[slice, ...]:
    """The index of these tokens in a value of `shape`."""
    return (*(slice(None),) * token_axis(shape), tokens)


def _equal(results: Iterable[mx.array], expected: Iterable[mx.array]) -> bool:
    return all(
        mx.allclose(result, value, RELATIVE, ABSOLUTE).item()
        for result, value in zip(results, expected, strict=True)
    )
