"""Runs with gradient clipping: what a limit changes, and kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.runs import adapter, killed_and_resumed, metrics_of, succeeds, train_arguments

STEPS = 5
ACCUMULATED = {"grad_accumulation": 2, "save_every": 4}


def test_a_limit_that_is_never_reached_changes_no_bit(bundle: Path, tmp_path: Path) -> None:
    free, limited = tmp_path / "free", tmp_path / "limited"
    succeeds(*train_arguments(bundle, free, STEPS, **ACCUMULATED))
    succeeds(*train_arguments(bundle, limited, STEPS, **ACCUMULATED, max_grad_norm=1e9))
    assert adapter(limited) == adapter(free)
    assert all(0 < one["gradient_norm"] < 1e9 for one in metrics_of(limited))
    assert not any("gradient_norm" in one for one in metrics_of(free))


def test_killed_and_resumed_is_the_same(
    bundle: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    whole, killed, free = tmp_path / "whole", tmp_path / "killed", tmp_path / "free"
    options = {**ACCUMULATED, "optimizer": "sgd", "learning_rate": 1.0}
    succeeds(*train_arguments(bundle, free, STEPS, **options))
    options["max_grad_norm"] = 0.01
    succeeds(*train_arguments(bundle, whole, STEPS, **options))
    assert adapter(whole) != adapter(free)
    norms = [one["gradient_norm"] for one in metrics_of(whole)]
    assert max(norms) > 0.01, norms
    moment = f"step {int(rng.integers(1, STEPS + 1))}"
    killed_and_resumed(killed, moment, train_arguments(bundle, killed, STEPS, **options))
    assert adapter(killed) == adapter(whole)
    assert [one["gradient_norm"] for one in metrics_of(killed)] == norms
