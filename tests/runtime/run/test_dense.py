"""The command that repeats a run on mlx-lm's dense model: the same adapters, the same losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from oracles import dense
from oracles.whole_model import relative_error
from support.runs import NO_OTHERS
from support.text_bundle import text_bundle

from harness.measure.command import ondevice
from harness.tasks.calls import Example, write_jsonl
from runtime.methods.adapters import Adapters


def test_the_dense_run_ends_like_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, run = text_bundle(tmp_path, ""), tmp_path / "run"
    (tmp_path / "data").mkdir()
    for name, first in (("train", 0), ("valid", 20)):
        films = [Example(f"film {n}:", f" is {n}") for n in range(first, first + 8)]
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", films)
    options = ("--steps=4", "--eval-every=2", "--eval-rows=3", "--learning-rate=1e-2", NO_OTHERS)
    fixed = (f"--data={tmp_path / 'data'}", "--budget=2GB", f"--output={run}")
    ondevice("train", str(bundle.path), *fixed, *options)
    monkeypatch.setattr(sys, "argv", ["dense", str(run)])
    dense.main()
    exact, ours = (Adapters.load(bundle.manifest, place) for place in (run / "dense", run))
    for name, value in exact.tensors.items():
        assert relative_error(ours.tensors[name], value) < 1e-3
    told = json.loads((run / "dense.json").read_text())
    saved = json.loads((run / "evaluations.json").read_text())
    expected = [told["before"], told["by_step"]["2"], told["by_step"]["4"]]
    losses = [saved[when]["loss"] for when in ("before", "2", "after")]
    assert losses == pytest.approx([evaluation["loss"] for evaluation in expected], rel=1e-4)
