"""Pieces of LLVM's language that several texts have: one number in all lanes, exp and tanh.

e to a number is 2**n times a polynomial of what is left (after Cody and Waite): n is what adding
1.5 * 2**23 rounds to, and the polynomial of degree 6 has the least worst error (Remez). Its
relative error is below 1.2e-7. A nan stays one.
"""

from __future__ import annotations

import struct

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440054690583e-4
ROUNDER = 12582912.0  # added to a small number, it leaves the nearest integer in the last bits
E = (1.0, 1.0, 0.49999994, 0.16666521, 0.04166839, 0.0083687454, 0.0013814541)
LOWEST = -87.0  # of which e to it is still a normal number

REDUCED = """  %{to}_turns = call {vector} @llvm.fma.v{lanes}f32({vector} %{of}, {vector} splat (float {log2e}), {vector} splat (float {rounder}))
  %{to}_n = fsub {vector} %{to}_turns, splat (float {rounder})
  %{to}_rough = call {vector} @llvm.fma.v{lanes}f32({vector} %{to}_n, {vector} splat (float {minus_high}), {vector} %{of})
  %{to}_rest = call {vector} @llvm.fma.v{lanes}f32({vector} %{to}_n, {vector} splat (float {minus_low}), {vector} %{to}_rough)
  %{to}_integer = bitcast {vector} %{to}_turns to {whole}
  %{to}_exponent = shl {whole} %{to}_integer, splat (i32 23)
  %{to}_p6 = freeze {vector} splat (float {c6})"""  # noqa: E501
TERM = "  %{to}_p{at} = call {vector} @llvm.fma.v{lanes}f32({vector} %{to}_p{before}, {vector} %{to}_rest, {vector} splat (float {c}))"  # noqa: E501
BOUND = """  %{to}_is_low = fcmp olt {vector} %{of}, splat (float {lowest})
  %{to}_x = select {mask} %{to}_is_low, {vector} splat (float {lowest}), {vector} %{of}"""
POWER = """  %{to}_power_bits = add {whole} %{to}_exponent, splat (i32 1065353216)
  %{to}_power = bitcast {whole} %{to}_power_bits to {vector}"""
# a product, because the sum of a nan's bits and an exponent may be a number
SCALED = """  %{to} = fmul {vector} %{to}_p0, %{to}_power"""
# tanh x = (e**2x - 1) / (e**2x + 1), with e**2x - 1 = 2**n (e**rest - 1) + 2**n - 1
TANH = """  %{to}_double = fmul {vector} %{of}, splat (float {factor})
  %{to}_is_low = fcmp olt {vector} %{to}_double, splat (float -30.0)
  %{to}_not_low = select {mask} %{to}_is_low, {vector} splat (float -30.0), {vector} %{to}_double
  %{to}_is_high = fcmp ogt {vector} %{to}_not_low, splat (float 30.0)
  %{to}_x = select {mask} %{to}_is_high, {vector} splat (float 30.0), {vector} %{to}_not_low"""
RATIO = """  %{to}_less_one = fmul {vector} %{to}_p1, %{to}_rest
  %{to}_power_less = fsub {vector} %{to}_power, splat (float 1.0)
  %{to}_above = call {vector} @llvm.fma.v{lanes}f32({vector} %{to}_power, {vector} %{to}_less_one, {vector} %{to}_power_less)
  %{to}_below = fadd {vector} %{to}_above, splat (float 2.0)
  %{to} = fdiv {vector} %{to}_above, %{to}_below"""  # noqa: E501


def splat(name: str, type_of: str, lanes: int) -> str:
    """A vector NAME_all, of which each lane is the value of that name."""
    to, vector = f"{name}_all", f"<{lanes} x {type_of}>"
    return (
        f"  %{to}_one = insertelement {vector} poison, {type_of} %{name}, i64 0\n"
        f"  %{to} = shufflevector {vector} %{to}_one, {vector} poison, "
        f"<{lanes} x i32> zeroinitializer"
    )


def vector_exp(of: str, to: str, lanes: int) -> str:
    """e to the values of a vector, of which none is much above 88; below `LOWEST` as at it."""
    bound, scaled = _format(BOUND, of, to, lanes), _format(SCALED, to, to, lanes)
    return "\n".join([bound, *_powers(to, lanes, 0), scaled])


def vector_tanh(of: str, to: str, cap: float, lanes: int) -> str:
    """tanh of a vector's values divided by a cap."""
    bound = _format(TANH, of, to, lanes, factor=hexadecimal(2 / cap))
    return "\n".join([bound, *_powers(to, lanes, 1), _format(RATIO, of, to, lanes)])


def hexadecimal(value: float) -> str:
    """A float32 as LLVM writes it: the bits of the double that it is."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    (bits,) = struct.unpack("<Q", struct.pack("<d", rounded))
    return f"0x{bits:016X}"


def _powers(to: str, lanes: int, last: int) -> list[str]:
    """The polynomial of what is left of TO_x, down to the term `last`, and the power of two."""
    terms = [
        _format(TERM, to, to, lanes, at=at, before=at + 1, c=hexadecimal(E[at]))
        for at in range(5, last - 1, -1)
    ]
    return [_format(REDUCED, f"{to}_x", to, lanes), *terms, _format(POWER, to, to, lanes)]


def _format(text: str, of: str, to: str, lanes: int, **more: str | int) -> str:
    return text.format(
        **{"of": of, "to": to, "lanes": lanes, "vector": f"<{lanes} x float>"},
        **{"whole": f"<{lanes} x i32>", "mask": f"<{lanes} x i1>"},
        **{"log2e": hexadecimal(LOG2E), "rounder": hexadecimal(ROUNDER)},
        **{"minus_high": hexadecimal(-LN2_HIGH), "minus_low": hexadecimal(-LN2_LOW)},
        **{"c6": hexadecimal(E[6]), "lowest": hexadecimal(LOWEST)},
        **more,
    )
