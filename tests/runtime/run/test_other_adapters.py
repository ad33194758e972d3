"""Runs, plans and evaluations that start from adapters of PEFT and mlx-lm."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from support.adapters import SOME, saved_adapter, written
from support.bundles import Tiny
from support.runs import adapter, here, json_of, succeeds, train_arguments


def test_a_run_from_another_tools_adapter_is_that_from_ours(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path
) -> None:
    bundle = tiny("gemma3", seq_lens=(16, 32), device="auto")
    saved_adapter(bundle, rng, tmp_path / "ours", **SOME)
    sources = {"ours": tmp_path / "ours"}
    for form in ("peft", "mlx"):
        sources[form] = written(bundle, tmp_path / "ours", form, tmp_path / form)
    losses = set()
    for source in sources.values():
        data = ["--data", "random:1", "--max-seq-length", 24]
        losses.add(json_of("eval", bundle.path, "--adapter", source, *data, by=here)["loss"])
        succeeds("plan", bundle.path, "--max-seq-length=24", "--adapter", source, "--json", by=here)
    assert len(losses) == 1
    runs = {name: tmp_path / f"run-{name}" for name in ("ours", "peft")}
    for steps, name in ((3, "ours"), (2, "peft")):
        options = {"adapter": sources[name], "lr_schedule": "constant"}
        succeeds(*train_arguments(bundle.path, runs[name], steps, **options))
    assert adapter(runs["peft"]) != adapter(runs["ours"])
    shutil.rmtree(sources["peft"])
    succeeds("train", "--resume", runs["peft"], "--steps", 3)
    assert adapter(runs["peft"]) == adapter(runs["ours"])


def test_an_unknown_scale_is_said_before_training_with_the_default(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path
) -> None:
    bundle = tiny("qwen2", device="auto")
    saved_adapter(bundle, rng, tmp_path / "ours")
    mlx = written(bundle, tmp_path / "ours", "mlx", tmp_path / "mlx")
    (mlx / "adapter_config.json").unlink()
    for name, alpha in (("default", {}), ("given", {"lora_alpha": 7})):
        options = {"adapter": mlx, **alpha}
        done = succeeds(*train_arguments(bundle.path, tmp_path / name, 1, **options), by=here)
        assert ("there is no adapter_config.json that says" in done.stderr) == (not alpha)
        assert ("--lora-alpha gives another" in done.stderr) == (not alpha)
    plan = succeeds("plan", bundle.path, "--adapter", mlx, by=here)
    assert "; --lora-alpha gives another" in plan.stderr
    done = succeeds("eval", bundle.path, "--adapter", mlx, "--data", "random:1", by=here)
    assert "the bundle's default is taken, 2 (alpha 16" in done.stderr
