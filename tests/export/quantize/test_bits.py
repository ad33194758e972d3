"""Bits for each matrix: against all choices that there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from export.quantize.bits import Candidate, choose_bits

Rng = np.random.Generator


def drawn(rng: Rng, count: int, added: np.ndarray) -> list[Candidate]:
    losses = rng.exponential(1, count)
    kept = rng.uniform(-0.2, 1.2, count)  # at 8 bits; some lose more
    return [
        Candidate(f"m{i}", int(a), int(2 * a), float(loss), float(loss * (1 - keep)))
        for i, (a, loss, keep) in enumerate(zip(added, losses, kept, strict=True))
    ]


def saved(candidates: list[Candidate], at_8: set[str]) -> float:
    return sum(c.saved_loss for c in candidates if c.name in at_8)


def added(candidates: list[Candidate], at_8: set[str]) -> int:
    return sum(c.added_bytes for c in candidates if c.name in at_8)


def best(candidates: list[Candidate], limit: int) -> float:
    """The most loss that any choice under the limit saves."""
    found = 0.0
    for pick in product([False, True], repeat=len(candidates)):
        names = {c.name for c, taken in zip(candidates, pick, strict=True) if taken}
        if added(candidates, names) <= limit:
            found = max(found, saved(candidates, names))
    return found


def at_8(candidates: list[Candidate], limit: int) -> set[str]:
    return {name for name, choice in choose_bits(candidates, limit).items() if choice.bits == 8}


def test_equal_sizes_are_chosen_best(rng: Rng) -> None:
    for _ in range(20):
        size = int(rng.integers(1, 1000))
        candidates = drawn(rng, 8, np.full(8, size))
        limit = int(rng.integers(0, 9 * size))
        names = at_8(candidates, limit)
        assert added(candidates, names) <= limit
        assert saved(candidates, names) == pytest.approx(best(candidates, limit))


def test_other_sizes_miss_less_than_one_matrix(rng: Rng) -> None:
    for _ in range(20):
        candidates = drawn(rng, 8, rng.integers(1, 1000, 8))
        limit = int(rng.integers(0, 4000))
        names = at_8(candidates, limit)
        assert added(candidates, names) <= limit
        missed = best(candidates, limit) - saved(candidates, names)
        left_out = [c.saved_loss for c in candidates if c.name not in names and c.saved_loss > 0]
        assert missed <= max(left_out, default=0) + 1e-9


def test_a_limit_for_all_takes_all_that_help(rng: Rng) -> None:
    candidates = drawn(rng, 12, rng.integers(1, 1000, 12))
    names = at_8(candidates, sum(c.added_bytes for c in candidates))
    assert names == {c.name for c in candidates if c.saved_loss > 0}
    assert at_8(candidates, 0) == set()


def test_order_does_not_matter(rng: Rng) -> None:
    candidates = drawn(rng, 10, rng.integers(1, 1000, 10))
    candidates += [Candidate(f"same{i}", 50, 100, 1.0, 0.1) for i in range(4)]
    limit = int(rng.integers(100, 3000))
    expected = choose_bits(candidates, limit)
    shuffled = [candidates[i] for i in rng.permutation(len(candidates))]
    again = choose_bits(shuffled, limit)
    assert again == expected
    assert list(again) == [c.name for c in shuffled]


def test_reasons_say_what_was_weighed() -> None:
    candidates = [
        Candidate("v", 100, 200, 0.5, 0.1),
        Candidate("k", 100, 200, 0.3, 0.1),
        Candidate("q", 100, 200, 0.1, 0.2),
    ]
    found = choose_bits(candidates, 150)
    assert {name: (choice.bits, choice.reason) for name, choice in found.items()} == {
        "v": (8, "8 bits save 0.4 of loss for 100 bytes, rank 1 of 3"),
        "k": (
            4,
            "8 bits save 0.2 of loss for 100 bytes, rank 2 of 3; 50 bytes of the limit were left",
        ),
        "q": (4, "8 bits save no loss (0.2, with 4 bits 0.1)"),
    }
