"""Runs that are killed at a step and resumed: the same files as of a run that nobody killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bfloat16 import require_bfloat16
from support.bundles import Rng, Tiny
from support.runs import (
    adapter,
    check_same,
    evaluations_of,
    json_of,
    killed_and_resumed,
    metrics_of,
    succeeds,
    summary_of,
    train_arguments,
)

STEPS, SAVE_EVERY = 4, 2
EVALUATED = {"eval_data": "random:9", "eval_rows": 1, "eval_every": 2}
CLIPPED = {"grad_accumulation": 2, "optimizer": "sgd", "learning_rate": 1.0}
LORA = {"lora_rank": 3, "lora_alpha": 6, "lora_targets": "q_proj,down_proj", "lora_layers": 2}
DROPPED = {**LORA, "lora_dropout": 0.2, "grad_accumulation": 2}
HALF = {"compute_dtype": "bfloat16", "lora_alpha": 16}
ENDS = {"lora_targets": "embed_tokens", "grad_accumulation": 2, "max_grad_norm": 0.5, **EVALUATED}
UNTIED = {"method": "mezo", "lora_targets": "embed_tokens,lm_head,down_proj"}
ADAM = {"method": "mezo", "zo_optimizer": "adam"}
PREFIX = {"trainable": "prefix"}
SCALED = {"method": "mezo", "zo_scaling": "parameter-norm"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixers": ("qwen3_5", {}),
    "lora": ("gemma3", DROPPED),
    "bfloat16": ("qwen2", HALF),
    "ends": ("qwen2", ENDS),
    "mezo": ("qwen2", {"method": "mezo", "batch_size": 2, **EVALUATED}),
    "adam": ("qwen2", {**ADAM, "learning_rate": 1e-3}),
    "prefix": ("qwen2", {**PREFIX, "max_grad_norm": 1.0}),
    "prefix-mezo": ("qwen2", {**PREFIX, "method": "mezo", "prefix_length": 3, **EVALUATED}),
}
LONGER: dict[str, tuple[str, dict[str, Any]]] = {  # other forms of what the cases above cover
    "bfloat16-mezo": ("qwen2", {**HALF, "method": "mezo"}),
    "zo-act": ("qwen2", {"method": "zo-act", "learning_rate": 1e-3}),
    "clipped": ("qwen2", {**CLIPPED, "max_grad_norm": 0.01}),
    **{f"mixers-{family}": (family, {}) for family in ("lfm2", "gemma4")},
    **{f"mixers-{family}-mezo": (family, {"method": "mezo"}) for family in ("qwen3_5", "gemma4")},
    "lora-mezo": ("gemma3", {**LORA, "method": "mezo"}),
    "ends-mezo": ("llama", {**UNTIED, "grad_accumulation": 2}),
    "fzoo": ("qwen2", {"method": "fzoo", "learning_rate": 1e-6}),
    "momentum": ("qwen2", {**ADAM, "zo_optimizer": "momentum", "zo_window": 4, "queries": 2}),
    "kzoo": ("qwen2", {"method": "kzoo", "seed_pool": 5}),
    "one-point": ("qwen2", {"method": "one-point", "learning_rate": 1e-5}),
    "hizoo": ("qwen2", {"method": "hizoo", "queries": 2, "hessian_smoothing": 1e-3}),
    "zo-act-adam": ("qwen2", {**ADAM, "method": "zo-act", "zo_window": 3}),
    "scaled": ("qwen2", {**SCALED, "zo_scaling": "gradient-norm", "zo_scaling_interval": 2}),
    "prefix-fzoo": ("qwen2", {**PREFIX, "method": "fzoo", "learning_rate": 1e-5}),
    "prefix-kzoo": ("qwen2", {**PREFIX, "method": "kzoo"}),
    "prefix-one-point": ("qwen2", {**PREFIX, "method": "one-point", "learning_rate": 1e-6}),
    "prefix-hizoo": ("qwen2", {**PREFIX, "method": "hizoo", "hessian_smoothing": 1e-3}),
    "prefix-adam": ("qwen2", {**PREFIX, **ADAM, "zo_window": 3}),
    "prefix-scaled": ("qwen2", {**PREFIX, **SCALED}),
}
MARKED = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LONGER)]


@pytest.mark.parametrize("case", MARKED)
def test_killed_resumed_and_replayed_is_the_same(
    tiny: Tiny, rng: Rng, tmp_path: Path, case: str
) -> None:
    family, options = {**CASES, **LONGER}[case]
    if "compute_dtype" in options:
        require_bfloat16()
    bundle = tiny(family, seq_lens=(16, 32), device="auto").path
    options = {"save_every": SAVE_EVERY, **options}
    flags = ["--rslora"] if case.startswith("lora") else []
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeeds(*train_arguments(bundle, whole, STEPS, **options), *flags)
    step = 1 if case == "mezo" else int(rng.integers(SAVE_EVERY + 1, STEPS + 1))
    words = [*train_arguments(bundle, killed, STEPS, **options), *flags]
    done = killed_and_resumed(killed, f"step {step}", words)
    resumed = f"resuming after step {SAVE_EVERY} of {STEPS}" in done.stderr
    assert resumed == (step > SAVE_EVERY), done.stderr  # the first ends before its first save
    check_same(killed, whole)
    summary = summary_of(killed)
    assert summary["peak_footprint_bytes"] <= 1.03 * summary["predicted_peak_bytes"]
    assert summary.get("eval") == summary_of(whole).get("eval")
    if "eval_data" in options:
        before, after = (evaluations_of(whole)[when]["loss"] for when in ("before", "after"))
        assert before != after
    if options.get("trainable") == "prefix":
        assert adapter(whole) != adapter(whole / "initial") == adapter(killed / "initial")
    log = killed / "trajectory.jsonl"
    assert log.exists() == ("method" in options)
    if log.exists():
        header, *steps = log.read_text().splitlines()
        described = json.loads((killed / "adapter_config.json").read_bytes())["ondevice"]
        assert json.loads(header)["lora"] == described["lora"] and len(steps) == STEPS
        assert json_of("replay", killed, "-o", tmp_path / "again")["identical"] is True
        assert adapter(tmp_path / "again") == adapter(whole)


def test_only_a_limit_that_is_reached_clips(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", seq_lens=(16, 32), device="auto").path
    limits = {"free": {}, "wide": {"max_grad_norm": 1e6}, "tight": {"max_grad_norm": 0.01}}
    for name, limit in limits.items():
        succeeds(*train_arguments(bundle, tmp_path / name, 1, **CLIPPED, **limit))
    free, wide, tight = (tmp_path / name for name in limits)
    assert adapter(wide) == adapter(free) != adapter(tight)
    assert not any("gradient_norm" in line for line in metrics_of(free))
    assert all(0 < line["gradient_norm"] < 1e9 for line in metrics_of(wide))
    assert max(line["gradient_norm"] for line in metrics_of(tight)) > 0.01
