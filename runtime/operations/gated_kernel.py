"""The gated kernel: the activation of SwiGLU and GeGLU and its vjp, on a CPU.

y = f(g) * u with f(g) = g s(z), where s is the logistic function: SiLU has z = g; GELU's tanh form
(Hendrycks and Gimpel, arXiv 1606.08415) has z = 2 sqrt(2 / pi) (g + 0.044715 g**3), for
1 + tanh v = 2 s(2 v). Then f'(g) = s + f(g) (1 - s) z'. NumPy computes it, because its exp is
vector code. It works in chunks, so that intermediate values stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet, view
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.gated import CHUNK_VALUES, Gated
from runtime.operations.kernel import Run, Tools

_GELU = 2 * math.sqrt(2 / math.pi)
CURVES = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU), "clamped": (1.702, 0.0)}
"""By activation what z(g) = first * g + second * g**3 takes."""

_LIMITS = {"clamped": 7.0}  # of gate and up, which has 1 added to it then

Floats = npt.NDArray[np.float32]


def gated(activation: str, gate: mx.array, up: mx.array) -> mx.array:
    """f(gate) * up, evaluated, of float32 arrays of one shape."""
    (y,) = _made(gate, 1)
    gate_into(activation, gate, up, y)
    return y


@quiet
def gate_into(activation: str, gate: mx.array, up: mx.array, y: mx.array) -> None:
    """`gated` in y, of MLX's arrays or of NumPy's."""
    for g, u, part, s, t in _chunks(gate, up, y):
        _logistic(activation, g, s, t)
        np.multiply(g, s, out=part)
        np.multiply(part, u, out=part)


def gated_vjp(
    activation: str, gate: mx.array, up: mx.array, dy: mx.array
) -> tuple[mx.array, mx.array]:
    """The gradients of gate and up, evaluated, from that of f(gate) * up."""
    d_gate, d_up = _made(gate, 2)
    _gate_vjp(activation, gate, up, dy, d_gate, d_up)
    return d_gate, d_up


@quiet
def _gate_vjp(
    activation: str,
    gate: mx.array,
    up: mx.array,
    dy: mx.array,
    d_gate: mx.array,
    d_up: mx.array,
) -> None:
    first, second = CURVES[activation]
    for g, u, d, dg, du, s, t in _chunks(gate, up, dy, d_gate, d_up):
        _logistic(activation, g, s, t)
        np.multiply(g, s, out=du)  # f(g)
        np.subtract(1, s, out=dg)
        np.multiply(dg, du, out=dg)
        if second:  # t holds g**2
            np.multiply(t, np.float32(3 * second), out=t)
            np.add(t, np.float32(first), out=t)
            np.multiply(dg, t, out=dg)
        elif first != 1:
            np.multiply(dg, np.float32(first), out=dg)
        np.add(dg, s, out=dg)  # f'(g)
        np.multiply(dg, u, out=dg)
        np.multiply(dg, d, out=dg)
        np.multiply(du, d, out=du)


def gated_by(device: str, activation: str, gate: mx.array, up: mx.array) -> mx.array:
    """`gated` on "cpu", or lazy on a "gpu", where MLX's own functions are vector code.

    Also of "clamped" activations.
    """
    gate, up = _clamped(activation, gate, up)
    return gated(activation, gate, up) if device == "cpu" else _plain(activation, gate, up)


def gated_vjp_by(
    device: str, activation: str, gate: mx.array, up: mx.array, dy: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_vjp` on "cpu", or lazy on a "gpu"; also of "clamped" activations."""
    g, u = _clamped(activation, gate, up)
    if device == "cpu":
        d_gate, d_up = gated_vjp(activation, g, u, dy)
    else:
        _, (d_gate, d_up) = mx.vjp(lambda g, u: _plain(activation, g, u), [g, u], [dy])
    if limit := _LIMITS.get(activation):
        d_gate, d_up = d_gate * (gate <= limit), d_up * (mx.abs(up) <= limit)
    return d_gate, d_up


def _clamped(activation: str, gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    limit = _LIMITS.get(activation)
    return (mx.minimum(gate, limit), mx.clip(up, -limit, limit) + 1) if limit else (gate, up)


def _plain(activation: str, gate: mx.array, up: mx.array) -> mx.array:
    first, second = CURVES[activation]
    return gate * mx.sigmoid(first * gate + second * gate * gate * gate) * up


def _logistic(activation: str, g: Floats, s: Floats, t: Floats) -> None:
    """s(z(g)) in s, and g**2 in t where z is cubic."""
    first, second = (np.float32(-factor) for factor in CURVES[activation])
    if second:
        np.multiply(g, g, out=t)
        np.multiply(t, second, out=s)
        np.add(s, first, out=s)
        np.multiply(s, g, out=s)
    else:
        np.multiply(g, first, out=s)
    np.exp(s, out=s)
    np.add(s, 1, out=s)
    np.divide(1, s, out=s)


def _made(like: mx.array, count: int) -> list[mx.array]:
    made = [mx.zeros(like.shape) for _ in range(count)]
    mx.eval(made)
    return made


def _chunks(*arrays: mx.array) -> Iterator[tuple[Floats, ...]]:
    """The same chunk of each array, where it lies, and two of scratch."""
    flat = [view(array).reshape(-1) for array in arrays]
    scratch = [np.empty(min(CHUNK_VALUES, flat[0].size), np.float32) for _ in range(2)]
    for start in range(0, flat[0].size, CHUNK_VALUES):
        parts = [values[start : start + CHUNK_VALUES] for values in flat]
        yield (*parts, *(buffer[: parts[0].size] for buffer in scratch))


@dataclass(frozen=True)
class GatedKernel:
    """The `Gated` operation, over any number of tokens."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Gated)
        for values in lanes:
            gate, up = (values[name] for name in operation.inputs)
            values[operation.outputs[0]] = gated(operation.activation, gate, up)

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation = run.operation(Gated)
        gate, up = (values[name] for name in operation.inputs)
        dy = values[f"~{operation.outputs[0]}"]
        d_inputs = gated_vjp(operation.activation, gate, up, dy)
        results = dict(zip(operation.inputs, d_inputs, strict=True))
        return {name: results[name] for name in run.instruction.wanted}
