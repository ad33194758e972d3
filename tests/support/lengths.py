"""Tests that are run briefly in the gate and at length in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_length(name: str, few: int, many: int) -> pytest.MarkDecorator:
    """The parameter `name`: `few` in the gate, `many` where slow tests are asked for."""
    return pytest.mark.parametrize(name, [few, pytest.param(many, marks=pytest.mark.slow)])


def first_of(name: str, *values: Any) -> pytest.MarkDecorator:
    """The parameter `name`: the first value in the gate, the others where slow tests are asked."""
    later = [pytest.param(value, marks=pytest.mark.slow) for value in values[1:]]
    return pytest.mark.parametrize(name, [values[0], *later])


def pairs(firsts: Iterable[Any], seconds: Iterable[Any], gate: int = 1) -> list[Any]:
    """All pairs; the gate has `gate` with each value of the longer list, with the others in turn.

    Values that are tuples are joined.
    """
    rows, columns = ([v if isinstance(v, tuple) else (v,) for v in vs] for vs in (firsts, seconds))
    turns = min(len(rows), len(columns))
    return [
        pytest.param(*a, *b, marks=() if (i - j) % turns < gate else pytest.mark.slow)
        for i, a in enumerate(rows)
        for j, b in enumerate(columns)
    ]
