"""Gated activations by code that LLVM has compiled, in all threads.

y = f(g) u with f(g) = g s(z(g)), the logistic function s and z = first g + second g**3; without an
up y = f(g). The reference is `runtime.operations.gated_kernel`, whose curves these are within some
1e-7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

from runtime.arrays.compiled_products import registers
from runtime.arrays.products import Floats
from runtime.arrays.vector_text import hexadecimal, vector_exp
from runtime.machine.machine_code import Function, compile_all, load
from runtime.machine.threads import Team

PIECE = 8192  # values that a thread takes at once

# Fields of a job: the next piece, the number of values, and the addresses of the arrays.
GATES = """
declare i64 @llvm.umin.i64(i64, i64)
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
declare {vector} @llvm.minnum.v{lanes}f32({vector}, {vector})
declare {vector} @llvm.masked.load.v{lanes}f32.p0(ptr, i32, {mask}, {vector})
declare void @llvm.masked.store.v{lanes}f32.p0({vector}, ptr, i32, {mask})
define void @gates(ptr %job, ptr %own) {{
begin:
  %count_at = getelementptr i64, ptr %job, i64 1
  %count = load i64, ptr %count_at
{fields}
  br label %piece
piece:
  %number = atomicrmw add ptr %job, i64 1 seq_cst
  %first = mul i64 %number, {piece}
  %some = icmp ult i64 %first, %count
  br i1 %some, label %begins, label %end
begins:
  %full = add i64 %first, {piece}
  %stop = call i64 @llvm.umin.i64(i64 %full, i64 %count)
  br label %values
values:
  %at = phi i64 [%first, %begins], [%next, %on]
  %left = sub i64 %stop, %at
  %few = call i64 @llvm.umin.i64(i64 %left, i64 {lanes})
  %few_narrow = trunc i64 %few to i32
  %few_one = insertelement {whole} poison, i32 %few_narrow, i64 0
  %few_all = shufflevector {whole} %few_one, {whole} poison, {whole} zeroinitializer
  %mask = icmp ugt {whole} %few_all, <{places}>
{loads}
{z}
  %minus = fneg {vector} %z
  %below = call {vector} @llvm.minnum.v{lanes}f32({vector} %minus, {vector} splat (float 88.0))
{exp}
  %one_more = fadd {vector} %e, splat (float 1.0)
  %s = fdiv {vector} splat (float 1.0), %one_more
  %f = fmul {vector} %g, %s
{results}
  %full_vector = icmp uge i64 %left, {lanes}
  br i1 %full_vector, label %whole, label %part
whole:
{stores}
  br label %on
part:
{masked}
  br label %on
on:
  %next = add i64 %at, {lanes}
  %more = icmp ult i64 %next, %stop
  br i1 %more, label %values, label %piece
end:
  ret void
}}
"""
LOAD = """  %{name}_at = getelementptr float, ptr %{name}_first, i64 %at
  %{name} = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %{name}_at, i32 4, {mask} %mask, {vector} zeroinitializer)"""  # noqa: E501
PLACE = "  %{name}_to = getelementptr float, ptr %{name}_first, i64 %at"
STORE = "  store {vector} %{name}, ptr %{name}_to, align 4"
# With AVX2 masked stores are slow, so only the last values take them
MASKED = """  call void @llvm.masked.store.v{lanes}f32.p0({vector} %{name}, ptr %{name}_to, i32 4, {mask} %mask)"""  # noqa: E501
FIELD = """  %{name}_field = getelementptr i64, ptr %job, i64 {at}
  %{name}_first = load ptr, ptr %{name}_field"""
# z and its slope; without a second factor g**2 would be infinite for nothing
Z = {
    True: """  %g2 = fmul {vector} %g, %g
  %z_by = call {vector} @llvm.fma.v{lanes}f32({vector} %g2, {vector} splat (float {second}), {vector} splat (float {first_factor}))
  %z = fmul {vector} %z_by, %g""",  # noqa: E501
    False: "  %z = fmul {vector} %g, splat (float {first_factor})",
}
Z_SLOPE = {
    True: "  %z_slope = call {vector} @llvm.fma.v{lanes}f32({vector} %g2, {vector} splat (float {third}), {vector} splat (float {first_factor}))",  # noqa: E501
    False: "  %z_slope = freeze {vector} splat (float {first_factor})",
}
SLOPE = """  %rest = fsub {vector} splat (float 1.0), %s
{z_slope}
  %f_rest = fmul {vector} %f, %rest
  %slope = call {vector} @llvm.fma.v{lanes}f32({vector} %f_rest, {vector} %z_slope, {vector} %s)"""
BACKWARD = """  %d_u = fmul {vector} %d, %u
  %dg = fmul {vector} %d_u, %slope
  %du = fmul {vector} %d, %f"""

KINDS = (
    (("g", "u"), ("y",)),
    (("g",), ("y",)),
    (("g", "u", "d"), ("dg", "du")),
    (("g", "d"), ("dg",)),
)
"""What is given and made: forward and backward, with an up and without."""


def compile_for(curves: Iterable[tuple[float, float]]) -> None:
    """Compile what gates with these factors take, all at once."""
    compile_all(text_of(factors, *kind) for factors, kind in product(set(curves), KINDS))


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
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    count = arrays[0].size
    team.run(_work(factors, given, made), (0, count, *addresses), -(-count // PIECE))


@cache
def _work(factors: tuple[float, float], given: tuple[str, ...], made: tuple[str, ...]) -> Function:
    return load(text_of(factors, given, made), 2)


def text_of(factors: tuple[float, float], given: tuple[str, ...], made: tuple[str, ...]) -> str:
    """The function of the named arrays: g, u and d (of y), to y, or dg and du."""
    lanes, (first, second) = registers().lanes, factors
    names: dict[str, str | int] = {
        **{"lanes": lanes, "vector": f"<{lanes} x float>", "whole": f"<{lanes} x i32>"},
        **{"mask": f"<{lanes} x i1>", "piece": PIECE},
        "places": ", ".join(f"i32 {lane}" for lane in range(lanes)),
        **{"first_factor": hexadecimal(first), "second": hexadecimal(second)},
        **{"third": hexadecimal(3 * second), "exp": vector_exp("below", "e", lanes)},
    }
    fields = [FIELD.format(name=name, at=2 + at) for at, name in enumerate((*given, *made))]
    names["fields"] = "\n".join(fields)
    names["loads"] = "\n".join(LOAD.format(**names, name=name) for name in given)
    cubic = bool(second)
    names["z"], names["z_slope"] = (part[cubic].format(**names) for part in (Z, Z_SLOPE))
    for key, line in (("stores", STORE), ("masked", MASKED)):
        names[key] = "\n".join(line.format(**names, name=name) for name in made)
    results = [PLACE.format(name=name) for name in made]
    if "d" in given:
        alone = "  %dg = fmul {vector} %d, %slope"
        results[:0] = [
            part.format(**names) for part in (SLOPE, BACKWARD if "u" in given else alone)
        ]
    elif "u" in given:
        results.insert(0, "  %y = fmul {vector} %f, %u".format(**names))
    else:
        results.insert(0, "  %y = freeze {vector} %f".format(**names))
    names["results"] = "\n".join(results)
    return GATES.format(**names)
