"""Gated activations by code that LLVM has compiled, in all threads.

y = f(g) u with f(g) = g s(z(g)), the logistic function s and z = first g + second g**3; without an
up y = f(g). The reference is `runtime.operations.gated_kernel`, whose curves these are within some
1e-7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from runtime.arrays.compiled_products import address, registers
from runtime.arrays.products import Floats
from runtime.arrays.vector_text import exp
from runtime.machine.llvm_code import Code, Pointer, Value, fields, fma, minimum
from runtime.machine.machine_code import Text, compile_all, function
from runtime.machine.threads import Team

PIECE = 8192  # values that a thread takes at once

KINDS = (
    (("g", "u"), ("y",)),
    (("g",), ("y",)),
    (("g", "u", "d"), ("dg", "du")),
    (("g", "d"), ("dg",)),
)
"""What is given and made: forward and backward, with an up and without."""


def compile_for(curves: Iterable[tuple[float, float]]) -> None:
    """Compile what gates with these factors take, all at once."""
    compile_all(_text(factors, *kind) for factors, kind in product(set(curves), KINDS))


def gate(team: Team, factors: tuple[float, float], parts: Sequence[Floats], y: Floats) -> None:
    """f(g) u, or f(g), in y, of arrays that lie in order."""
    names = ("g", "u")[: len(parts)]
    _run(team, factors, names, ("y",), [*parts, y])


def gate_vjp(
    team: Team, factors: tuple[float, float], parts: Sequence[Floats], results: Sequence[Floats]
) -> None:
    """The gradients of gate and up, or of the gate alone, where the last part is dy."""
    names = ("g", "u", "d") if len(parts) == 3 else ("g", "d")
    _run(team, factors, names, ("dg", "du")[: len(results)], [*parts, *results])


def _run(
    team: Team,
    factors: tuple[float, float],
    given: tuple[str, ...],
    made: tuple[str, ...],
    arrays: Sequence[Floats],
) -> None:
    addresses = map(address, arrays)
    count = arrays[0].size
    work = function(_text(factors, given, made), 2)
    team.run(work, (0, count, *addresses), -(-count // PIECE))


def _text(factors: tuple[float, float], given: tuple[str, ...], made: tuple[str, ...]) -> Text:
    return Text(text_of, (factors, given, made, registers().lanes))


def text_of(
    factors: tuple[float, float], given: tuple[str, ...], made: tuple[str, ...], lanes: int
) -> str:
    """The function of the named arrays: g, u and d (of y), to y, or dg and du."""
    return Code(lanes).text(_gates, factors=factors, given=given, made=made)


def _gates(
    code: Code,
    job: Pointer,
    own: Pointer,
    *,
    factors: tuple[float, float],
    given: tuple[str, ...],
    made: tuple[str, ...],
) -> None:
    """Take pieces until none is left. A job: the next piece, how many values, and the arrays."""
    a = fields(job, ("next", "count", *given, *made), {*given, *made})
    with code.endless() as leave:
        first = job.view("i64").atomic("add", 1) * PIECE
        leave(first >= a.count)
        stop = minimum(first + PIECE, a.count)
        with code.loop(first, stop, code.lanes) as at:
            left = stop - at
            mask = left.mask()
            values = {name: (vars(a)[name] + at).load(mask) for name in given}
            results = zip(made, _curves(*factors, **values), strict=True)
            places = [(vars(a)[name] + at, result) for name, result in results]
            for whole in code.either(left >= code.lanes):  # with AVX2 masked stores are slow
                for place, result in places:
                    place.store(result, None if whole else mask)


def _curves(
    first: float, second: float, g: Value, u: Value | None = None, d: Value | None = None
) -> list[Value]:
    """f(g) u or f(g); with d, which is dy, the gradients of g and u, or of g."""
    if second:  # without it g**2 would be infinite for nothing
        g2 = g * g
        z, z_slope = fma(g2, second, first) * g, fma(g2, 3 * second, first)
    else:
        z, z_slope = g * first, g.like(first)
    s = g.like(1.0) / (exp(minimum(-z, 88.0)) + 1.0)
    f = g * s
    if d is None:
        return [f if u is None else f * u]
    slope = fma(f * (g.like(1.0) - s), z_slope, s)
    return [d * slope] if u is None else [d * u * slope, d * f]
