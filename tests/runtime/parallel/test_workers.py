"""Every group of rows at every point is one worker's; uneven workers get uneven portions."""

from __future__ import annotations

import numpy as np
import pytest
from support.exchange import on_workers

from runtime.core.errors import UsageError
from runtime.parallel.exchange import Exchange
from runtime.parallel.workers import Workers, shares


def test_shares_are_all_items_in_order_and_nearly_equal(rng: np.random.Generator) -> None:
    for _ in range(50):
        items, workers = int(rng.integers(0, 30)), int(rng.integers(1, 9))
        parts = shares(items, [1.0] * workers)
        assert [item for part in parts for item in part] == [*range(items)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        speeds = rng.uniform(0.1, 9, workers).tolist()
        uneven = [*map(len, shares(items, speeds))]
        assert sum(uneven) == items and min(uneven) >= min(1, items // workers)
        fewer = map(len, shares(max(0, items - 1), speeds))
        assert all(a <= b for a, b in zip(fewer, uneven, strict=True))


def test_shares_follow_the_speeds() -> None:
    assert [*map(len, shares(8, [3.0, 1.0]))] == [6, 2]
    assert [*map(len, shares(2, [100.0, 1.0]))] == [1, 1]  # nobody has nothing


def test_a_grid_has_perturbations_inside_and_data_outside() -> None:
    def portions(exchange: Exchange) -> list[tuple[list[int], list[int]]]:
        workers = Workers(exchange, data=2, perturb=2, speeds=(2.0, 1.0, 1.0, 1.0))
        assert workers.mine(5, 3) == workers.portions(5, 3)[exchange.rank]
        return [(list(groups), list(points)) for groups, points in workers.portions(5, 3)]

    of_each = on_workers(4, portions)
    assert of_each == [of_each[0]] * 4
    assert of_each[0] == [
        ([0, 1, 2], [0, 1]),
        ([0, 1, 2], [2]),
        ([3, 4], [0, 1]),
        ([3, 4], [2]),
    ]


def test_about_equal_workers_share_evenly() -> None:
    def counts(exchange: Exchange, *passes_per_s: float) -> list[int]:
        workers = Workers(exchange, data=2)
        workers.balance(passes_per_s)
        return [len(portion.groups) for portion in workers.portions(9)]

    assert on_workers(2, lambda exchange: counts(exchange, 3.0, 1.5)) == [[6, 3]] * 2
    assert on_workers(2, lambda exchange: counts(exchange, 3.0, 2.5)) == [[5, 4]] * 2
    assert on_workers(2, lambda exchange: counts(exchange, 1e-9, 2.5)) == [[1, 8]] * 2


def test_a_grid_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="data=2,perturb=3 is a grid of 6 workers, and 1 are"):
        Workers(data=2, perturb=3)


def test_idle_workers_are_refused() -> None:
    def check(exchange: Exchange) -> None:
        workers = Workers(exchange, data=2, perturb=2)
        workers.check(2, 2)
        with pytest.raises(UsageError, match=r"data=2: so many .* the 1 rows of a step; give a "):
            workers.check(1, 2)
        with pytest.raises(UsageError, match="the 1 groups of 2 rows"):
            workers.check(1, 2, together=2)
        with pytest.raises(UsageError, match="perturb=2: so many workers cannot share the 1 for"):
            workers.check(2, 1)

    on_workers(4, check)
