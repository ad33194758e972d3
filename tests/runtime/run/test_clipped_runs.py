"""Runs with gradient clipping: what a limit changes, kills, and refusals."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
from support.runs import adapter, here, ondevice, struck, train_arguments

STEPS = 9
ACCUMULATED = {"grad_accumulation": 2, "save_every": 4}


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_limit_that_is_never_reached_changes_no_bit(bundle: Path, tmp_path: Path) -> None:
    free, limited = tmp_path / "free", tmp_path / "limited"
    assert ondevice(*train_arguments(bundle, free, STEPS, **ACCUMULATED)).returncode == 0
    done = ondevice(*train_arguments(bundle, limited, STEPS, **ACCUMULATED, max_grad_norm=1e9))
    assert done.returncode == 0, done.stderr
    assert adapter(limited) == adapter(free)
    assert all(0 < one["gradient_norm"] < 1e9 for one in entries(limited))
    assert not any("gradient_norm" in one for one in entries(free))


def test_killed_and_resumed_is_the_same(
    bundle: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    whole, killed, free = tmp_path / "whole", tmp_path / "killed", tmp_path / "free"
    options = {**ACCUMULATED, "optimizer": "sgd", "learning_rate": 1.0}
    assert ondevice(*train_arguments(bundle, free, STEPS, **options)).returncode == 0
    options["max_grad_norm"] = 0.01
    assert ondevice(*train_arguments(bundle, whole, STEPS, **options)).returncode == 0
    assert adapter(whole) != adapter(free)
    norms = [one["gradient_norm"] for one in entries(whole)]
    assert max(norms) > 0.01, norms
    moment = f"step {int(rng.integers(1, STEPS + 1))}"
    done = struck(signal.SIGKILL, moment, *train_arguments(bundle, killed, STEPS, **options))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ondevice("train", "--resume", killed).returncode == 0
    assert adapter(killed) == adapter(whole)
    assert [one["gradient_norm"] for one in entries(killed)] == norms


def test_mezo_is_refused_with_the_reason(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = here(*train_arguments(bundle, run, 3, method="mezo", max_grad_norm=1))
    assert refused.returncode == 2 and "mezo computes none" in refused.stderr
    assert not run.exists()
    refused = here("plan", bundle, "--method=mezo", "--max-grad-norm=1", "--max-seq-length=24")
    assert refused.returncode == 2 and "mezo computes none" in refused.stderr
    refused = here(*train_arguments(bundle, run, 3, max_grad_norm=-1))
    assert refused.returncode == 2 and "max_grad_norm is -1" in refused.stderr
