"""`--adapter-dtype bfloat16`: blocks run with rounded adapters; float32 ones are trained and saved.

That gradients and MeZO's steps are those of the rounded values is in `test_every_plan`.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles.dense import run_dense
from safetensors.numpy import load_file
from support.bundles import Rng, Tiny
from support.lengths import first_of
from support.models import adapters_of
from support.plans import predicted, task_of
from support.runs import adapter, json_of, killed_and_resumed, succeeds, train_arguments

from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.plan.sizes import LEVELS

HALF = "bfloat16"


def test_blocks_get_rounded_copies_of_adapters_that_stay_exact(tiny: Tiny, rng: Rng) -> None:
    adapters = adapters_of(tiny("qwen2"), rng)
    block = adapters.manifest.layers[0]
    name, exact = next(iter(adapters.loras(block).items()))
    rounded = adapters.in_dtype(HALF).loras(block)[name]
    for ours, whole in ((rounded.a, exact.a), (rounded.b, exact.b)):
        assert (ours.dtype, whole.dtype) == (mx.bfloat16, mx.float32)
        error = mx.abs(ours.astype(mx.float32) - whole)
        assert mx.all(error <= 2**-8 * mx.abs(whole)).item()
        assert error.max().item() > 0
    assert {value.dtype for value in adapters.in_dtype(HALF).tensors.values()} == {mx.float32}


def test_a_plan_counts_the_rounded_copies(tiny: Tiny) -> None:
    manifest = tiny("llama").manifest

    def adapter_bytes(method: str, dtype: str) -> tuple[int, int, int]:
        plan = predicted(manifest, task_of(32, method, adapter_dtype=dtype), LEVELS[-1])
        return plan.adapter_bytes, plan.gradient_bytes, plan.predicted_peak_bytes

    for method in ("mebp", "mezo"):
        whole, half = adapter_bytes(method, "float32"), adapter_bytes(method, HALF)
        assert whole[0] / 2 < half[0] < whole[0]  # the current matrix has its own as float32
        assert half[2] < whole[2]
        assert half[1] == whole[1]  # gradients are float32, and MeZO has none


def test_a_run_trains_rounded_adapters_and_is_evaluated_as_it_was(
    tiny: Tiny, tmp_path: Path
) -> None:
    bundle = tiny("qwen2").path
    held_out = {"eval_data": "random:9", "eval_rows": 2}
    after = {}
    for dtype in ("float32", HALF):
        arguments = train_arguments(bundle, tmp_path / dtype, 6, adapter_dtype=dtype, **held_out)
        after[dtype] = json_of(*arguments)["eval"]["after"]["loss"]
        kept = load_file(tmp_path / dtype / "adapters.safetensors")
        assert {value.dtype for value in kept.values()} == {np.dtype(np.float32)}
    assert after[HALF] == pytest.approx(after["float32"], rel=1e-2)
    assert after[HALF] != after["float32"]

    def evaluated(*more: str) -> float:
        flags = ["--data=random:9", "--eval-rows=2", "--max-seq-length=24", *more]
        return float(json_of("eval", bundle, f"--adapter={tmp_path / HALF}", *flags)["loss"])

    assert evaluated("--adapter-dtype", HALF) == pytest.approx(after[HALF], rel=1e-6)
    assert evaluated() != evaluated("--adapter-dtype", HALF)
    config = load(TrainConfig, tmp_path / HALF / "config.toml", {})
    with pytest.raises(UsageError, match="float32"):
        run_dense(config, tmp_path / HALF, 1)


@first_of("method", "mebp", "mezo")
def test_a_killed_run_goes_on_to_the_same_bytes(tiny: Tiny, tmp_path: Path, method: str) -> None:
    given = {"adapter_dtype": HALF, "method": method}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    path = tiny("qwen3", "mixed").path
    arguments = [train_arguments(path, run, 8, **given) for run in (whole, killed)]
    succeeds(*arguments[0])
    killed_and_resumed(killed, "step 4", arguments[1])
    assert adapter(killed) == adapter(whole)
