"""Properties of a traced function that let a runtime run it faster or in less memory.

There are two: no token's results may depend on other tokens, so that it can run on a few tokens at
a time, from their position on; and it may be an activation, with a gate or without, for which a
runtime has a kernel. Both are found by running the function on random values, not by reading its
graph: the spelling of a norm or an activation in mlx-lm does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import xielu

from export.cut.trace import Function
from runtime.operations.elementwise import Activation
from runtime.operations.gated import PARAMETERS
from runtime.operations.values import Shape, T, is_parameter, shape_at, token_axis

TRIAL_TOKENS = 8  # in each half of the sequence that the function is tried on
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # how close equal values are; GELU and its tanh form differ by 5e-4
GATE_SCALE = 10.0  # of the random values: they reach far into both flat ends of f

ACTIVATIONS: dict[Activation, Callable[..., mx.array]] = {
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
    "gelu": nn.gelu,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "xielu": xielu,
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


def gated_activation(
    forward: Function, vjp: Function, *shapes: tuple[int, ...], parameters: int = 0
) -> Activation:
    """The activation f if `forward` computes f(g) * u or f(g), or "" if no known f does.

    Values and gradients must both be those of MLX's own f.

    Args:
        forward: takes (g, u), or one array that holds both, or g, then numbers; returns an array.
        vjp: takes the same and the gradient of the result, and returns those of g and u.
        shapes: those of what `forward` takes, and of what it returns.
        parameters: how many numbers it takes.
    """
    *taken, made = shapes

    def gate(f: Callable[..., mx.array], *given: mx.array) -> mx.array:
        width, count = made[-1], len(given) - parameters
        values, numbers = given[:count], given[count:]
        g, *up = (x[..., at : at + width] for x in values for at in range(0, x.shape[-1], width))
        return f(g, *numbers) * up[0] if up else f(g, *numbers)

    names = (
        name
        for name, f in ACTIVATIONS.items()
        if parameters == PARAMETERS.get(name, 0)
        and computes(partial(gate, f), forward, vjp, *taken, made, parameters=parameters)
    )
    return next(names, "")


def computes(
    gate: Callable[..., mx.array],
    forward: Function,
    vjp: Function,
    *shapes: tuple[int, ...],
    parameters: int = 0,
) -> bool:
    """Whether `forward` and `vjp` compute values and gradients of a gate, see above."""
    keys = mx.random.split(mx.random.key(0), len(shapes))
    *given, dy = (mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True))
    given = [GATE_SCALE * value for value in given]
    count = len(given) - parameters
    values, gradients = mx.vjp(lambda *own: gate(*own, *given[count:]), given[:count], [dy])
    return _equal([*forward(*given), *vjp(*given, dy)], [*values, *gradients])


def _of_tokens(shape: Shape, tokens: slice) -> tuple[slice, ...]:
    """The index of these tokens in a value of `shape`."""
    return (*(slice(None),) * token_axis(shape), tokens)


def _equal(results: Iterable[mx.array], expected: Iterable[mx.array]) -> bool:
    near = [
        mx.allclose(result, value, RELATIVE, ABSOLUTE)
        for result, value in zip(results, expected, strict=True)
    ]
    return bool(mx.stack(near).all().item())  # one evaluation for all
