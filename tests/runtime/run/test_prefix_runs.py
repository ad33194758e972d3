"""Runs that train a prefix: killed, resumed, replayed, evaluated, generated with, and refused."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.bundles import Tiny
from support.plans import LINUX
from support.runs import adapter, here, ondevice, struck, train_arguments

from runtime.adapters.lora import prefix_settings
from runtime.run import budget

CASES: dict[str, dict[str, Any]] = {
    "mebp": {"method": "mebp", "max_grad_norm": 1.0},
    "mezo": {"method": "mezo", "prefix_length": 3, "eval_data": "random:9", "eval_every": 3},
    "fzoo": {"method": "fzoo", "learning_rate": 1e-5},
    "kzoo": {"method": "kzoo"},
    "one-point": {"method": "one-point", "learning_rate": 1e-6},
    "hizoo": {"method": "hizoo", "hessian_smoothing": 1e-3},
    "adam": {"method": "mezo", "zo_optimizer": "adam", "zo_window": 3},
    "scaled": {"method": "mezo", "zo_scaling": "parameter-norm"},
    "bfloat16": {"method": "mezo", "adapter_dtype": "bfloat16"},
}
QUICK = ("mebp", "mezo")
MARKED = [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES]


@pytest.fixture
def bundle(tiny: Tiny) -> Path:
    return tiny("gemma3", seq_lens=(16, 32), device="auto").path


@pytest.mark.parametrize("case", MARKED)
def test_killed_resumed_and_replayed_is_the_same(bundle: Path, tmp_path: Path, case: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"save_every": 3, "trainable": "prefix", **CASES[case]}
    done = ondevice(*train_arguments(bundle, whole, 8, **options))
    assert done.returncode == 0, done.stderr
    done = struck(signal.SIGKILL, "step 5", *train_arguments(bundle, killed, 8, **options))
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = ondevice("train", "--resume", killed)
    assert done.returncode == 0 and "resuming after step 3 of 8" in done.stderr, done.stderr
    assert adapter(killed) == adapter(whole) != adapter(whole / "initial")
    assert adapter(killed / "initial") == adapter(whole / "initial")
    summary = json.loads((whole / "summary.json").read_text())
    rows = CASES[case].get("prefix_length", 5)
    tensors = load_file(whole / "adapters.safetensors")
    assert summary["trained"] == "prefix" and summary["lora"]["prefix"] == rows
    assert summary["trainable_parameters"] == sum(one.size for one in tensors.values())
    assert {one.shape[0] for one in tensors.values()} == {rows}
    if case == "mebp":
        return
    replayed = ondevice("replay", killed, "-o", tmp_path / "again", "--json")
    assert json.loads(replayed.stdout)["identical"] is True, replayed.stderr
    assert adapter(tmp_path / "again") == adapter(whole)


def test_a_prefix_is_trained_further_and_used(bundle: Path, tmp_path: Path) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    options = {"trainable": "prefix", "method": "mezo", "prefix_length": 2}
    assert here(*train_arguments(bundle, run, 2, **options)).returncode == 0
    done = here(*train_arguments(bundle, more, 1, method="mebp", adapter=run))
    assert done.returncode == 0, done.stderr
    assert 'trainable = "prefix"' in (more / "config.toml").read_text()
    assert "prefix_length = 2" in (more / "config.toml").read_text()
    words = ["eval", bundle, "--data=random:3", "--json", "--budget=400MB", "--seq-len=16"]
    losses = [
        json.loads(here(*words, *own).stdout)["loss"]
        for own in ([], [f"--adapter={run}"], [f"--adapter={more}"])
    ]
    assert len(set(losses)) == 3
    for options, said in (
        ({"trainable": "prefix", "prefix_length": 3}, "has 2 rows"),
        ({"trainable": "lora"}, "is a prefix; give --trainable prefix"),
    ):
        refused = here(*train_arguments(bundle, tmp_path / "no", 1, adapter=run, **options))
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    alone = tmp_path / "alone"  # without the file that describes it
    alone.mkdir()
    shutil.copy(run / "adapters.safetensors", alone)
    for options, said in (
        ({}, "it holds a prefix of keys and values, and LoRA adapters are expected"),
        ({"trainable": "prefix"}, "has 2 rows, and 5 are expected"),
    ):
        refused = here(*train_arguments(bundle, tmp_path / "no", 1, adapter=alone, **options))
        assert refused.returncode == 4 and said in refused.stderr, refused.stderr
    written = here("adapter", run, "--to=peft", "-o", tmp_path / "peft")
    fused = here("fuse", bundle, f"--adapter={run}", "-o", tmp_path / "fused")
    for refused in (written, fused):
        assert refused.returncode == 2 and "is a prefix of keys and values" in refused.stderr
    assert not (tmp_path / "peft").exists() and not (tmp_path / "fused").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_length": 3}, "--prefix-length 3 is an option of --trainable prefix"),
        ({"trainable": "lora", "prefix_length": 3}, "no effect with trainable lora"),
        ({"trainable": "prefix", "prefix_length": 0}, "from 1 to 1024"),
        (
            {"trainable": "prefix", "lora_rank": 3},
            "leave out --lora-rank, or give --trainable lora",
        ),
        ({"trainable": "prefix", "lora_dropout": 0.1}, "trainable prefix has no LoRA adapters"),
        ({"trainable": "prefix", "method": "zo-act"}, "--trainable prefix is not for zo-act"),
        ({"trainable": "prefix", "rounding": "nearest"}, "no effect with trainable prefix"),
        ({"trainable": "prefix", "prefix_length": 33}, "--prefix-length 33 is too long"),
    ],
)
def test_what_a_prefix_cannot_do_is_refused(
    bundle: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    refused = here(*train_arguments(bundle, tmp_path / "run", 1, **options))
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_the_rows_of_a_prefix(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few kilobytes, by which this process itself may shrink between two plans."""
    monkeypatch.setattr(budget, "this_machine", lambda device, arithmetic: LINUX)
    path = tiny("gemma3", seq_lens=(16, 32), device="auto").path
    plan = ["plan", path, "--budget=400MB", "--method=mezo", "--seq-len=32", "--json"]
    peaks = []
    for length in (1, 5, 500):
        done = here(*plan, "--trainable=prefix", f"--prefix-length={length}")
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["predicted_peak_bytes"])
    assert peaks[0] < peaks[1] < peaks[2]
    assert prefix_settings(3).describe() == "a prefix of 3 keys and values in every layer"
