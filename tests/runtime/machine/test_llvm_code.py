"""Code written as Python, compiled and run, against the same in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from support.bundles import Rng
from support.compiled import require_compiled

from runtime.machine.llvm_code import Aligned, Code, Integer, Pointer, Variable, fma, minimum, where
from runtime.machine.machine_code import function

LANES = 8


@pytest.fixture(scope="module", autouse=True)
def where_it_compiles() -> None:
    require_compiled()


class Numbers(NamedTuple):
    at: Pointer
    count: Integer


def collatz(code: Code, numbers: Numbers, steps: Pointer) -> None:
    """The steps of each number until it is 1."""
    with code.loop(0, numbers.count) as at:
        value, count = Variable(numbers.at.view("i64")[at]), Variable(code.value(0))
        with code.endless([value, count]) as leave:
            leave(value.now.equals(1))
            for odd in code.either((value.now % 2).equals(1), [value]):
                value.now = value.now * 3 + 1 if odd else value.now // 2
            count.now = count.now + 1
        steps.view("i64")[at] = count.now


def power(code: Code, x: Pointer, y: Pointer, *, exponent: int) -> None:
    """A number to a power, which each call has as its own function."""
    result = Variable(code.value(1.0, "float"))
    with code.loop(0, exponent, change=[result]):
        result.now = result.now * x[0]
    y[0] = result.now


def powers(code: Code, x: Pointer, y: Pointer, exponents: Pointer, count: Integer) -> None:
    """x to the power 1, 2, or else 3."""
    with code.loop(0, count) as at:
        for exponent in code.cases(exponents.view("i64")[at], (1, 2, 3)):
            code.call(power, x + at, y + at, exponent=exponent)


def scaled(code: Code, x: Pointer, y: Pointer, total: Pointer, count: Integer) -> None:
    """y = 2 x + 1 where x is positive and 0 elsewhere, and the sum of y."""
    z = Variable(code.zeros())
    with code.loop(0, count, LANES, [z]) as at:
        mask = minimum(count - at, LANES).mask()
        given = (x + at).load(mask)
        made = where(given > 0.0, fma(given, 2.0, 1.0), 0.0)
        (y + at).store(made, mask)
        z.now = z.now + made
    total[0] = z.now.sum()


def test_variables_of_loops_and_branches() -> None:
    numbers, steps = np.arange(1, 60, dtype=np.int64), np.zeros(59, np.int64)
    run = function(Code(LANES).text(collatz), 3)
    run(numbers.ctypes.data, len(numbers), steps.ctypes.data)
    for number, found in zip(numbers.tolist(), steps.tolist(), strict=True):
        count = 0
        while number != 1:
            number, count = number * 3 + 1 if number % 2 else number // 2, count + 1
        assert found == count


def test_cases_call_functions_of_their_own_settings(rng: Rng) -> None:
    x = rng.standard_normal(40).astype(np.float32)
    exponents, y = rng.integers(1, 6, 40), np.zeros(40, np.float32)
    run = function(Code(LANES).text(powers), 4)
    run(x.ctypes.data, y.ctypes.data, exponents.ctypes.data, len(x))
    expected = np.where(exponents == 1, x, np.where(exponents == 2, x * x, x * x * x))
    assert (y == expected).all()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_masks_leave_the_rest_as_it_is(rng: Rng, count: int) -> None:
    x, y = rng.integers(-9, 9, 48).astype(np.float32), np.full(48, 5, np.float32)
    total = np.zeros(1, np.float32)
    run = function(Code(LANES).text(scaled), 4)
    run(x.ctypes.data, y.ctypes.data, total.ctypes.data, count)
    expected = np.where(x > 0, 2 * x + 1, 0)[:count]
    assert (y[:count] == expected).all() and (y[count:] == 5).all()
    assert total[0] == expected.sum()


def first(code: Code, at: Aligned, count: Integer) -> None:
    at.view("i64")[0] = count


def wrong_number(code: Code, at: Aligned, x: Pointer) -> None:
    code.call(first, at, x[0])


def wrong_place(code: Code, at: Pointer, count: Integer) -> None:
    code.call(first, at, count)


def too_long(code: Code, at: Pointer, count: Integer) -> None:
    at[0] = count


@pytest.mark.parametrize("wrong", [wrong_number, wrong_place, too_long])
def test_values_of_another_type_are_refused(wrong: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"first takes|stored where float lies"):
        Code(LANES).text(wrong)
