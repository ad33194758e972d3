"""Runs, plans and evaluations that start from adapters of PEFT and mlx-lm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.adapters import SOME, saved_adapter, written
from support.bundles import Tiny
from support.runs import adapter, here, ondevice, train_arguments


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
        data = ["--data", "random:1", "--max-seq-length", 24, "--json"]
        done = here("eval", bundle.path, "--adapter", source, *data)
        assert done.returncode == 0, done.stderr
        losses.add(json.loads(done.stdout)["loss"])
        plan = here("plan", bundle.path, "--max-seq-length=24", "--adapter", source, "--json")
        assert plan.returncode == 0, plan.stderr
    assert len(losses) == 1
    runs = {name: tmp_path / f"run-{name}" for name in ("ours", "peft")}
    for steps, name in ((3, "ours"), (2, "peft")):
        options = {"adapter": sources[name], "lr_schedule": "constant"}
        done = ondevice(*train_arguments(bundle.path, runs[name], steps, **options))
        assert done.returncode == 0, done.stderr
    assert adapter(runs["peft"]) != adapter(runs["ours"])
    shutil.rmtree(sources["peft"])
    done = ondevice("train", "--resume", runs["peft"], "--steps", 3)
    assert done.returncode == 0, done.stderr
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
        done = here(*train_arguments(bundle.path, tmp_path / name, 1, **options))
        assert done.returncode == 0, done.stderr
        assert ("there is no adapter_config.json that says" in done.stderr) == (not alpha)
        assert ("--lora-alpha gives another" in done.stderr) == (not alpha)
    plan = here("plan", bundle.path, "--adapter", mlx)
    assert plan.returncode == 0 and "; --lora-alpha gives another" in plan.stderr


@pytest.mark.parametrize("option", [("lora_rank", 8), ("lora_layers", 2), ("lora_alpha", 7)])
def test_other_settings_than_the_adapters_are_refused_with_both(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path, option: tuple[str, int]
) -> None:
    bundle = tiny("gemma3", seq_lens=(16, 32), device="auto")
    saved_adapter(bundle, rng, tmp_path / "ours", **SOME)
    peft = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft")
    name, value = option
    given = {"adapter": peft, name: value}
    refused = here(*train_arguments(bundle.path, tmp_path / "run", 1, **given))
    there = {"lora_rank": 3, "lora_layers": 1, "lora_alpha": 5}[name]
    flag = f"--{name.replace('_', '-')}"
    assert refused.returncode == 2 and not (tmp_path / "run").exists()
    assert f"{flag} {value}" in refused.stderr and f"{flag} {there}" in refused.stderr
