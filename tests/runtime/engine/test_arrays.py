"""Evaluating results one after another, with little allocated ahead."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from runtime.engine.arrays import CpuArrays, GpuArrays
from runtime.system import backend

VALUES = 500_000
Rng = np.random.Generator


def sums(rng: Rng, count: int) -> list[mx.array]:
    """Lazy sums over as many arrays, each of which MLX could allocate at once."""
    x = mx.array(rng.standard_normal(VALUES).astype(np.float32))
    mx.eval(x)
    return [mx.tanh(x + index).sum() for index in range(count)]


def test_little_is_allocated_ahead_on_a_cpu(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_planned", [0])  # without a plan, which would allow for more
    results = sums(rng, 10)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    CpuArrays().evaluate([mx.stack(results).sum()])
    arrays = (mx.get_peak_memory() - before) / (VALUES * 4)
    print(arrays)
    assert arrays < 3  # the one that is computed, and the next; all ten otherwise


def test_a_plan_bounds_what_is_allocated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use what the plan has for all blocks, and more only where that is already in use."""
    unlimited = mx.set_memory_limit(1 << 60)

    def bound() -> int:
        with backend.bounded_run_ahead(5_000_000):
            limit = mx.set_memory_limit(0)
            mx.set_memory_limit(limit)
        return limit

    try:
        for planned, expected in ((1 << 50, 1 << 50), (0, mx.get_active_memory() + 5_000_000)):
            monkeypatch.setattr(backend, "_planned", [planned])
            assert bound() == expected
            assert mx.set_memory_limit(1 << 60) == 1 << 60
    finally:
        mx.set_memory_limit(unlimited)


@pytest.mark.parametrize("limit", [0, 1 << 61])
def test_an_evaluation_leaves_the_memory_limit_as_it_was(rng: Rng, limit: int) -> None:
    before = mx.set_memory_limit(limit)
    try:
        for arrays in (CpuArrays(), GpuArrays()):
            results = sums(rng, 3)
            arrays.evaluate(results)
            arrays.evaluate([])
            assert all(np.isfinite(result.item()) for result in results)
        assert mx.set_memory_limit(before) == limit
    finally:
        mx.set_memory_limit(before)
