"""e to the values of a vector, and their hyperbolic tangents.

e to a number is 2**n times a polynomial of what is left (after Cody and Waite): n is what adding
1.5 * 2**23 rounds to, and the polynomial of degree 6 has the least worst error (Remez). Its
relative error is below 1.2e-7. A nan stays one.
"""

from __future__ import annotations

from runtime.machine.llvm_code import Value, fma, where

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440054690583e-4
ROUNDER = 12582912.0  # added to a small number, it leaves the nearest integer in the last bits
E = (1.0, 1.0, 0.49999994, 0.16666521, 0.04166839, 0.0083687454, 0.0013814541)
LOWEST = -87.0  # of which e to it is still a normal number


def exp(x: Value) -> Value:
    """e to the values of a vector, of which none is much above 88; below `LOWEST` as at it."""
    power, _, polynomial = _powers(where(x < LOWEST, LOWEST, x), 0)
    return polynomial * power  # the sum of a nan's bits and an exponent may be a number


def tanh(x: Value, cap: float) -> Value:
    """tanh y = (e**2y - 1) / (e**2y + 1) of y = x / cap, with e**2y = 2**n e**rest."""
    double = x * (2 / cap)
    double = where(double < -30.0, -30.0, double)
    power, rest, polynomial = _powers(where(double > 30.0, 30.0, double), 1)
    less_one = fma(power, polynomial * rest, power - 1.0)
    return less_one / (less_one + 2.0)


def _powers(x: Value, last: int) -> tuple[Value, Value, Value]:
    """2**n, the rest of x, and the polynomial of it down to the term `last`."""
    turns = fma(x, LOG2E, ROUNDER)
    n = turns - ROUNDER
    rest = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    polynomial = fma(rest, E[6], E[5])
    for term in reversed(E[last:5]):
        polynomial = fma(polynomial, rest, term)
    power = (turns.view("i32") << 23) + 0x3F800000
    return power.view("float"), rest, polynomial
