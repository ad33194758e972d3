"""The gated kernel: activations f of MLPs with a gate or without, and their vjps, on a CPU.

y = f(g) * u, or f(g). SiLU and GELU's tanh form (Hendrycks and Gimpel, arXiv 1606.08415) are
f(g) = g s(z(g)) with the logistic function s: z = g, or z = 2 sqrt(2 / pi) (g + 0.044715 g**3), for
1 + tanh v = 2 s(2 v). GELU itself is g P(g) with P of the normal distribution, by formula 7.1.26 of
Abramowitz and Stegun, within 8e-8. NumPy computes all, because its exp is vector code, in chunks,
so that intermediate values stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet, view
from runtime.arrays.compiled_gates import compile_for, gate, gate_vjp
from runtime.arrays.values import Gradients, Loras, Values
from runtime.machine.threads import Team
from runtime.operations.base import Operation
from runtime.operations.gated import CHUNK_VALUES, LOGISTIC, Gated
from runtime.operations.kernel import Kernel, Run
from runtime.operations.values import is_parameter

_NORMAL = (
    0.3275911 / math.sqrt(2),
    (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592),
)
_LIMITS = {"clamped": 7.0}  # of gate and up, which has 1 added to it then

Floats = npt.NDArray[np.float32]
Curve = Callable[[Floats, Floats | None, Floats | None, Floats, Floats], None]
"""Computes f of g, its slope, or both, where they are given, with two arrays of scratch."""


def gated(
    curve: Curve, *parts: mx.array, team: Team | None = None, to: mx.array | None = None
) -> mx.array:
    """f(gate) * up, evaluated, of float32 arrays of one shape; without an up f(gate).

    It is in the memory of `to` if that is given, which may be the gate's where code is compiled.
    """
    y = _made(parts[0], 1)[0] if to is None else to
    gate_into(curve, parts, y, team)
    return y


@quiet
def gate_into(curve: Curve, parts: Sequence[Any], y: Any, team: Team | None = None) -> None:
    """`gated` in y, of MLX's arrays or of NumPy's."""
    if team is not None and (given := _in_order(curve, [*parts, y])):
        gate(team, curve.args, given[:-1], given[-1])  # type: ignore[attr-defined]
        return
    for (g, *up, f), s, t in _chunks(*parts, y):
        curve(g, f, None, s, t)
        for u in up:
            np.multiply(f, u, out=f)


def gated_vjp(
    curve: Curve,
    *parts: mx.array,
    team: Team | None = None,
    to: list[mx.array] | None = None,
) -> list[mx.array]:
    """The gradients of gate and up, or of the gate alone, evaluated. The last part is dy.

    They are in the memory of `to` if that is given.
    """
    gradients = _made(parts[0], len(parts) - 1) if to is None else to
    gate_vjp_into(curve, parts, gradients, team)
    return gradients


@quiet
def gate_vjp_into(
    curve: Curve, parts: Sequence[Any], gradients: Sequence[Any], team: Team | None = None
) -> None:
    """`gated_vjp` in arrays that are given."""
    if team is not None and (given := _in_order(curve, [*parts, *gradients])):
        gate_vjp(team, curve.args, given[: len(parts)], given[len(parts) :])  # type: ignore[attr-defined]
        return
    alone = len(gradients) == 1
    for (g, *values), s, t in _chunks(*parts, *gradients):
        if alone:
            d, dg = values
            curve(g, None, dg, s, t)
        else:
            u, d, dg, du = values
            curve(g, du, dg, s, t)
            np.multiply(du, d, out=du)
            np.multiply(dg, u, out=dg)
        np.multiply(dg, d, out=dg)


def prepare(operations: Iterable[Operation]) -> None:
    """Compile what the gates among these operations take."""
    gates = (each for each in operations if isinstance(each, Gated))
    compile_for(LOGISTIC[each.activation] for each in gates if each.activation in LOGISTIC)


def _in_order(curve: Curve, arrays: Sequence[Any]) -> list[Floats]:
    """The arrays, where compiled code takes such a curve and all lie in order."""
    if not (isinstance(curve, partial) and curve.func is _logistic):
        return []
    views = [view(array) for array in arrays]
    return views if all(each.flags.c_contiguous for each in views) else []


def curve_of(operation: Gated, argument: Callable[[str], Any]) -> Curve:
    """The operation's activation, whose parameters are those arguments."""
    numbers = [np.asarray(argument(name)).item() for name in operation.inputs if is_parameter(name)]
    return partial(CURVES[operation.activation], *numbers)


def parts_of(values: Sequence[Any], width: int) -> list[Floats]:
    """Gate and up, of one value's halves, or the gate alone, where they lie: all (..., width)."""
    return [
        array[..., first : first + width]
        for array in map(view, values)
        for first in range(0, array.shape[-1], width)
    ]


def gated_by(device: str, activation: str, gate: mx.array, up: mx.array) -> mx.array:
    """`gated` on "cpu", or lazy on a "gpu", where MLX's own functions are vector code.

    Also of "clamped" activations.
    """
    gate, up = _clamped(activation, gate, up)
    on_cpu = device == "cpu"
    return gated(CURVES[activation], gate, up) if on_cpu else _plain(activation, gate, up)


def gated_vjp_by(
    device: str, activation: str, gate: mx.array, up: mx.array, dy: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_vjp` on "cpu", or lazy on a "gpu"; also of "clamped" activations."""
    g, u = _clamped(activation, gate, up)
    if device == "cpu":
        d_gate, d_up = gated_vjp(CURVES[activation], g, u, dy)
    else:
        _, (d_gate, d_up) = mx.vjp(lambda g, u: _plain(activation, g, u), [g, u], [dy])
    if limit := _LIMITS.get(activation):
        d_gate, d_up = d_gate * (gate <= limit), d_up * (mx.abs(up) <= limit)
    return d_gate, d_up


def _clamped(activation: str, gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    limit = _LIMITS.get(activation)
    return (mx.minimum(gate, limit), mx.clip(up, -limit, limit) + 1) if limit else (gate, up)


def _plain(activation: str, gate: mx.array, up: mx.array) -> mx.array:
    first, second = LOGISTIC[activation]
    return gate * mx.sigmoid(first * gate + second * gate * gate * gate) * up


def _logistic(
    first: float,
    second: float,
    g: Floats,
    f: Floats | None,
    slope: Floats | None,
    s: Floats,
    t: Floats,
) -> None:
    """f = g s(z), f' = s + f (1 - s) z'."""
    if second:
        np.multiply(g, g, out=t)
        np.multiply(t, np.float32(-second), out=s)
        np.add(s, np.float32(-first), out=s)
        np.multiply(s, g, out=s)
    else:
        np.multiply(g, np.float32(-first), out=s)
    np.exp(s, out=s)
    np.add(s, 1, out=s)
    np.divide(1, s, out=s)
    if f is not None:
        np.multiply(g, s, out=f)
    if slope is None:
        return
    np.subtract(1, s, out=slope)
    if f is None:
        np.multiply(slope, g, out=slope)
        np.multiply(slope, s, out=slope)
    else:
        np.multiply(slope, f, out=slope)
    if second:  # t holds g**2
        np.multiply(t, np.float32(3 * second), out=t)
        np.add(t, np.float32(first), out=t)
        np.multiply(slope, t, out=slope)
    elif first != 1:
        np.multiply(slope, np.float32(first), out=slope)
    np.add(slope, s, out=slope)


def _normal(g: Floats, f: Floats | None, slope: Floats | None, s: Floats, t: Floats) -> None:
    """f = g P(g), f' = P(g) + g P'(g)."""
    by, (first, *others) = _NORMAL
    p = slope if f is None else f
    assert p is not None
    np.abs(g, out=t)
    np.multiply(t, np.float32(by), out=t)
    np.add(t, 1, out=t)
    np.divide(1, t, out=t)
    np.multiply(t, np.float32(first), out=p)
    for coefficient in others:
        np.add(p, np.float32(coefficient), out=p)
        np.multiply(p, t, out=p)
    np.multiply(g, g, out=s)
    np.multiply(s, np.float32(-0.5), out=s)
    np.exp(s, out=s)
    np.multiply(p, s, out=p)
    np.subtract(1, p, out=p)  # P(|g|) - P(-|g|)
    np.copysign(p, g, out=p)
    np.add(p, 1, out=p)
    np.multiply(p, np.float32(0.5), out=p)
    if slope is not None:
        np.multiply(s, np.float32(1 / math.sqrt(2 * math.pi)), out=s)
        np.multiply(s, g, out=s)
        np.add(p, s, out=slope)
    if f is not None:
        np.multiply(p, g, out=f)


def _xielu(
    alpha_p: float,
    alpha_n: float,
    beta: float,
    eps: float,
    g: Floats,
    f: Floats | None,
    slope: Floats | None,
    s: Floats,
    t: Floats,
) -> None:
    """f = p g**2 + beta g for g above 0, else (exp(min(g, eps)) - 1 - g) n + beta g."""
    p, n = (float(np.logaddexp(0, alpha)) for alpha in (alpha_p, alpha_n))
    n, positive = n + beta, g > 0
    np.minimum(g, np.float32(eps), out=s)
    if f is not None:
        np.expm1(s, out=f)
        np.subtract(f, g, out=f)
        np.multiply(f, np.float32(n), out=f)
        np.multiply(g, g, out=t)
        np.multiply(t, np.float32(p), out=t)
        np.copyto(f, t, where=positive)
        np.multiply(g, np.float32(beta), out=t)
        np.add(f, t, out=f)
    if slope is not None:
        np.less(g, np.float32(eps), out=t)
        np.exp(s, out=s)
        np.multiply(s, t, out=s)
        np.subtract(s, 1, out=s)
        np.multiply(s, np.float32(n), out=s)
        np.multiply(g, np.float32(2 * p), out=t)
        np.copyto(s, t, where=positive)
        np.add(s, np.float32(beta), out=slope)


def _power(
    power: int, g: Floats, f: Floats | None, slope: Floats | None, s: Floats, t: Floats
) -> None:
    """f = max(g, 0)**power for a power of 1 or 2."""
    np.maximum(g, 0, out=s)
    if f is not None:
        np.power(s, power, out=f)
    if slope is not None:
        np.sign(s, out=slope) if power == 1 else np.multiply(s, 2, out=slope)


CURVES: dict[str, Callable[..., None]] = {
    **{name: partial(_logistic, *factors) for name, factors in LOGISTIC.items()},
    "gelu": _normal,
    "relu": partial(_power, 1),
    "relu2": partial(_power, 2),
    "xielu": _xielu,
}
"""f and its slope by activation; a function of its parameters, and else a `Curve`."""


def _made(like: mx.array, count: int) -> list[mx.array]:
    made = [mx.zeros(like.shape) for _ in range(count)]
    mx.eval(made)
    return made


def _chunks(*arrays: Any) -> Iterator[tuple[list[Floats], Floats, Floats]]:
    """The same chunk of each array, where it lies, and two of scratch."""
    rows = [values.reshape(-1, values.shape[-1]) for values in map(view, arrays)]
    if all(values.flags.c_contiguous for values in rows):  # not so in halves of wider values
        rows = [values.reshape(1, -1) for values in rows]
    count, columns = rows[0].shape
    scratch = [np.empty(min(CHUNK_VALUES, columns), np.float32) for _ in range(2)]
    for row in range(count):
        for start in range(0, columns, CHUNK_VALUES):
            parts = [values[row, start : start + CHUNK_VALUES] for values in rows]
            s, t = (buffer[: parts[0].size] for buffer in scratch)
            yield parts, s, t


class GatedKernel(Kernel):
    """The `Gated` operation, over any number of tokens."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Gated)
        (name,) = operation.outputs
        width = int(run.program.values[name][-1])
        for values, own in zip(lanes, loras, strict=True):
            curve = curve_of(operation, partial(self._argument, run, own))
            y = mx.zeros((1, run.tokens, width))
            self.tools.arrays.settle(y)
            parts = parts_of([values[each] for each in operation.activations], width)
            gate_into(curve, parts, y, self.tools.matrices.team)
            values[name] = y

    def _argument(self, run: Run, loras: Loras, name: str) -> mx.array:
        return self.tools.argument(run.block, name, {}, loras)

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation = run.operation(Gated)
        curve = curve_of(operation, partial(self._argument, run, loras))
        dy, given = values[f"~{operation.outputs[0]}"], [values[n] for n in operation.activations]
        made = [mx.zeros(value.shape) for value in given]
        self.tools.arrays.settle(made)
        of_parts = (parts_of(arrays, dy.shape[-1]) for arrays in (given, made))
        parts, d_parts = of_parts
        gate_vjp_into(curve, [*parts, dy], d_parts, self.tools.matrices.team)
        results = dict(zip(operation.activations, made, strict=True))
        return {name: results[name] for name in run.instruction.wanted}
