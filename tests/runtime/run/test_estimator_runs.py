"""Runs of every zeroth-order variant: killed and resumed, replayed, and their options refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.runs import adapter, ondevice, struck, train_arguments

CASES: dict[str, dict[str, Any]] = {
    "fzoo": {"method": "fzoo", "learning_rate": 1e-6},
    "momentum": {"zo_optimizer": "momentum", "zo_window": 4, "queries": 2},
    "kzoo": {"method": "kzoo", "seed_pool": 5},
    "one-point": {"method": "one-point", "learning_rate": 1e-5},
    "hizoo": {"method": "hizoo", "queries": 2, "hessian_smoothing": 1e-3},
    "adam": {"zo_optimizer": "adam", "learning_rate": 1e-3},
    "zo-act": {"method": "zo-act", "learning_rate": 1e-3},
    "zo-act-adam": {"method": "zo-act", "zo_optimizer": "adam", "zo_window": 3},
    "scaled": {"zo_scaling": "gradient-norm", "zo_scaling_interval": 2},
}


SLOW = {"scaled", "zo-act-adam"}  # longer forms of what the others cover
MARKED = [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_killed_resumed_and_replayed_is_the_same(bundle: Path, tmp_path: Path, case: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"save_every": 3, "method": "mezo", **CASES[case]}
    done = ondevice(*train_arguments(bundle, whole, 8, **options))
    assert done.returncode == 0, done.stderr
    done = struck(signal.SIGKILL, "step 5", *train_arguments(bundle, killed, 8, **options))
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = ondevice("train", "--resume", killed)
    assert done.returncode == 0 and "resuming after step 3 of 8" in done.stderr, done.stderr
    assert adapter(killed) == adapter(whole)
    logs = [(run / "trajectory.jsonl").read_text() for run in (whole, killed)]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 1 + 8
    states = [next((run / "saves").iterdir()) / "method.bin" for run in (whole, killed)]
    assert states[0].read_bytes() == states[1].read_bytes()
    replayed = ondevice("replay", killed, "-o", tmp_path / "again", "--json")
    assert json.loads(replayed.stdout)["identical"] is True
    assert adapter(tmp_path / "again") == adapter(whole)
