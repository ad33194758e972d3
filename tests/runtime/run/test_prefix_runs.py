"""Runs that train a prefix: what they keep, trained further, evaluated, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.plans import LINUX
from support.runs import here, json_of, refuses, succeeds, summary_of, train_arguments

from runtime.adapters.lora import prefix_settings
from runtime.run import budget


def test_a_prefix_is_trained_further_and_used(bundle: Path, tmp_path: Path) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    options = {"trainable": "prefix", "method": "mezo", "prefix_length": 2}
    done = succeeds(*train_arguments(bundle, run, 2, **options), by=here)
    assert done.stdout.endswith(f"; generate and eval take --adapter {run}\n")  # no weights hold it
    summary, tensors = summary_of(run), load_file(run / "adapters.safetensors").values()
    assert summary["trained"] == "prefix" and summary["lora"]["prefix"] == 2
    assert summary["trainable_parameters"] == sum(one.size for one in tensors)
    assert {one.shape[0] for one in tensors} == {2}
    succeeds(*train_arguments(bundle, more, 1, method="mebp", adapter=run), by=here)
    assert 'trainable = "prefix"' in (more / "config.toml").read_text()
    assert "prefix_length = 2" in (more / "config.toml").read_text()
    words = ["eval", bundle, "--data=random:3", "--budget=400MB", "--seq-len=16"]
    given = ([], [f"--adapter={run}"], [f"--adapter={more}"])
    assert len({json_of(*words, *own, by=here)["loss"] for own in given}) == 3
    for options, said in (
        ({"trainable": "prefix", "prefix_length": 3}, "has 2 rows"),
        ({"trainable": "lora"}, "is a prefix; give --trainable prefix"),
    ):
        refuses(2, said, *train_arguments(bundle, tmp_path / "no", 1, adapter=run, **options))
    alone = tmp_path / "alone"  # without the file that describes it
    alone.mkdir()
    shutil.copy(run / "adapters.safetensors", alone)
    for options, said in (
        ({}, "it holds a prefix of keys and values, and LoRA adapters are expected"),
        ({"trainable": "prefix"}, "has 2 rows, and 5 are expected"),
    ):
        refuses(4, said, *train_arguments(bundle, tmp_path / "no", 1, adapter=alone, **options))
    for words in (("adapter", run, "--to=peft"), ("fuse", bundle, f"--adapter={run}")):
        refuses(2, "is a prefix of keys and values", *words, "-o", tmp_path / words[0])
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "fuse").exists()


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
        ({"trainable": "prefix", "prefix_length": 33}, "--prefix-length 33 is too long"),
    ],
)
def test_what_a_prefix_cannot_do_is_refused(
    bundle: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    refuses(2, said, *train_arguments(bundle, tmp_path / "run", 1, **options))
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_the_rows_of_a_prefix(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few kilobytes, by which this process itself may shrink between two plans."""
    monkeypatch.setattr(budget, "this_machine", lambda *asked: LINUX)
    plan = ["plan", bundle, "--budget=400MB", "--method=mezo", "--seq-len=32", "--trainable=prefix"]
    peaks = [
        json_of(*plan, f"--prefix-length={length}", by=here)["predicted_peak_bytes"]
        for length in (1, 5, 500)
    ]
    assert peaks[0] < peaks[1] < peaks[2]
    assert prefix_settings(3).describe() == "a prefix of 3 keys and values in every layer"
