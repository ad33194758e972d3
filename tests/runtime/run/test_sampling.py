"""Sampling: the limits and their order by a plain reference, and draws that follow the weights."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.bundles import Rng

from runtime.core.errors import BundleError
from runtime.operations.logits import choosing_bytes
from runtime.run.sampling import TILE, Sampling


def plain(logits: Any, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that are left, by sorting all of them."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = order[:top_k] if top_k else order
    shares = np.exp(logits[order] - logits.max())
    shares = shares / shares.sum()
    kept, total = [], 0.0
    for token, share in zip(order, shares, strict=True):
        kept.append(token)
        total += float(share)
        if total >= top_p and top_p < 1:
            break
    return {token for token, share in zip(kept, shares, strict=False) if share >= min_p * shares[0]}


@pytest.mark.parametrize("size", [5, 700, 40_000])
def test_limits_are_those_of_the_reference(rng: Rng, size: int) -> None:
    for _ in range(12):
        logits = rng.normal(0, rng.uniform(0.1, 4), size).astype(np.float32)
        top_k = int(rng.choice([0, 1, 3, size, size + 1]))
        top_p, min_p = float(rng.choice([1, 0.5, 0.93])), float(rng.choice([0, 0.02, 0.4, 1]))
        found = Sampling(1.0, top_k, top_p, min_p).allowed(logits)
        assert list(np.flatnonzero(found)) == sorted(plain(logits, top_k, top_p, min_p))


def test_impossible_tokens_are_none_for_numpy_that_raises() -> None:
    """A program may have asked NumPy to; their probabilities are too small for numbers."""
    logits = np.array([0, -1e4, -1e4, 1], np.float32)
    with np.errstate(all="raise"):
        chosen = [Sampling(0.7, top_p=0.9).choose(logits, position) for position in range(9)]
    assert set(chosen) == {0, 3}


def test_tokens_are_drawn_as_often_as_their_weights_say(rng: Rng) -> None:
    logits = rng.normal(0, 1, 6).astype(np.float32)
    temperature, count = 0.7, 4000
    sampling = Sampling(temperature, min_p=0.05, seed=int(rng.integers(1 << 40)))
    kept = sorted(plain(logits, 0, 1, 0.05))
    weights = np.exp(logits[kept] / temperature)
    drawn = [sampling.choose(logits, position) for position in range(count)]
    assert set(drawn) <= set(kept)
    for token, share in zip(kept, weights / weights.sum(), strict=True):
        assert drawn.count(token) / count == pytest.approx(share, abs=5 / np.sqrt(count))
    again = [sampling.choose(logits, position) for position in range(50)]
    assert again == drawn[:50]  # by the seed and the position alone
    other = Sampling(temperature, min_p=0.05, seed=sampling.seed + 1)
    alike = np.zeros(6, np.float32)
    ours, theirs = (
        [one.choose(alike, position) for position in range(50)] for one in (sampling, other)
    )
    assert ours != theirs


def test_temperature_zero_takes_the_most_likely(rng: Rng) -> None:
    logits = rng.normal(0, 1, 100).astype(np.float32)
    assert Sampling().choose(logits, 3) == int(logits.argmax())
    assert Sampling(1e-3).choose(logits, 3) == int(logits.argmax())


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(BundleError, match="not finite"):
            Sampling(1.0).choose(np.array([0, bad, 1], np.float32), 0)


def test_temperatures_next_to_zero_and_without_end_say_nothing(
    rng: Rng, recwarn: pytest.WarningsRecorder
) -> None:
    logits = rng.normal(0, 1, 50).astype(np.float32)
    assert Sampling(5e-324).choose(logits, 3) == int(logits.argmax())
    assert {Sampling(1e308).choose(logits, position) for position in range(600)} == set(range(50))
    assert not recwarn.list


def test_of_equal_logits_as_many_are_left_as_the_limit_says() -> None:
    logits = np.array([2, 1, 2, 1, 1, 0], np.float32)
    assert list(np.flatnonzero(Sampling(1.0, top_k=3).allowed(logits))) == [0, 1, 2]
    assert list(np.flatnonzero(Sampling(1.0, top_p=1e-9).allowed(logits))) == [0]


def test_tokens_of_every_tile_are_drawn(rng: Rng) -> None:
    logits = np.full(3 * TILE + 5, -50, np.float32)
    likely = [0, TILE - 1, TILE, 2 * TILE + 7, 3 * TILE + 4]
    logits[likely] = 0
    sampling = Sampling(1.0, seed=int(rng.integers(1 << 40)))
    assert {sampling.choose(logits, position) for position in range(200)} == set(likely)


@pytest.mark.parametrize("limits", [(0, 1.0, 0.0), (200_000, 0.999, 1e-4), (0, 0.9999, 0.0)])
def test_a_choice_takes_no_more_than_its_plan(rng: Rng, limits: tuple[int, float, float]) -> None:
    logits = rng.normal(0, 1, 262_144).astype(np.float32)
    sampling = Sampling(1.0, *limits)
    tracemalloc.start()
    sampling.choose(logits, 0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= choosing_bytes(len(logits))
