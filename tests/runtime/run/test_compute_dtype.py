"""`--compute-dtype bfloat16` in whole runs: what they keep, and what is refused.

Runs of the tests' own process multiply by the oracle, on every processor.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from support.bfloat16 import with_rounded_products
from support.bundles import Tiny
from support.lora import with_lora
from support.plans import LINUX, MAC, predicted, task_of
from support.runs import here, metrics_of, refuses, succeeds, train_arguments

from runtime.bundle.manifest import Slice
from runtime.config.train import PlanConfig
from runtime.core.errors import UsageError
from runtime.machine import compute_dtype, machine_code
from runtime.methods.zeroth import forward_only
from runtime.plan.size_levels import LEVELS
from runtime.run.budget import for_values

HALF, BYTES = "bfloat16", 2
ASKED, AUTOMATIC = (
    PlanConfig(bundle="model", budget="1GB", compute_dtype=each) for each in (HALF, "auto")
)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rounded_products(monkeypatch)


def test_the_losses_are_those_of_float32_but_for_rounding(
    tiny: Tiny, tmp_path: Path, rounded: None
) -> None:
    bundle, losses = tiny("gemma3").path, {}
    for dtype in ("float32", HALF):
        run = tmp_path / dtype
        succeeds(*train_arguments(bundle, run, 2, compute_dtype=dtype), by=here)
        losses[dtype] = [line["loss"] for line in metrics_of(run)]
        config = tomllib.loads((run / "config.toml").read_text())
        plan = json.loads((run / "plan.json").read_text())
        assert config["compute_dtype"] == plan["compute_dtype"] == dtype
    assert losses[HALF] == pytest.approx(losses["float32"], rel=1e-2)
    assert losses[HALF] != losses["float32"]


def test_automatic_is_settled_when_a_run_begins(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it goes on as it began, whatever is faster later, and elsewhere."""
    run = tmp_path / "run"
    monkeypatch.setattr("runtime.machine.compute_dtype.lacking", lambda: "none here")
    done = succeeds(*train_arguments(tiny("qwen2").path, run, 1, compute_dtype="auto"), by=here)
    assert "products in float32: bfloat16: none here" in done.stderr
    assert tomllib.loads((run / "config.toml").read_text())["compute_dtype"] == "float32"
    assert json.loads((run / "plan.json").read_text())["compute_dtype"] == "float32"
    refuses(2, "--compute-dtype bfloat16", "plan", tiny("qwen2").path, "--compute-dtype", HALF)


def test_perturbations_that_rounding_swallows_are_refused_with_numbers(
    tiny: Tiny, tmp_path: Path, rounded: None
) -> None:
    """With the usual rank of 8 and a scale of 2 from 2.5e-4 on."""
    given = {"method": "mezo", "compute_dtype": HALF, "lora_rank": 8, "lora_alpha": 16}
    bundle = tiny("qwen2").path
    small = train_arguments(bundle, tmp_path / "small", 1, epsilon=2.4e-4, **given)
    said = "by about 0.0008 of their size, and rounding changes them by 0.002"
    done = refuses(2, said, *small)
    assert "give at least 0.0003, or --compute-dtype float32" in done.stderr
    assert not (tmp_path / "small").exists()
    large = train_arguments(bundle, tmp_path / "large", 1, epsilon=2.6e-4, **given)
    succeeds(*large, by=here)


def test_a_gpu_rounds_twice_as_much(tiny: Tiny) -> None:
    bundle = with_lora(tiny("qwen2"), rank=8, alpha=16.0)
    adapters = SimpleNamespace(manifest=replace(bundle.manifest, device="gpu"))
    begin = SimpleNamespace(plan=SimpleNamespace(compute_dtype=HALF), adapters=adapters)
    forward_only._check_resolved(SimpleNamespace(epsilon=1e-3), begin)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"rounding changes them by 0\.003"):
        forward_only._check_resolved(SimpleNamespace(epsilon=4e-4), begin)  # type: ignore[arg-type]


def test_weights_that_move_are_not_rounded(tiny: Tiny, tmp_path: Path, rounded: None) -> None:
    bundle = tiny("qwen2", trainable="full").path
    given = {"method": "mezo", "trainable": "full", "compute_dtype": HALF}
    said = "less than bfloat16 resolves; give float32"
    refuses(2, said, *train_arguments(bundle, tmp_path / "run", 1, **given))


def test_values_that_bfloat16_does_not_hold_stay_float32_on_a_gpu(tiny: Tiny) -> None:
    """The numbers of tokens, which Gemma 4's layers look up."""
    half = replace(MAC, compute_dtype=HALF)
    manifest = tiny("gemma4").manifest
    with pytest.raises(UsageError, match="does not hold the numbers of tokens"):
        for_values(half, manifest, ASKED)
    automatic = for_values(half, manifest, AUTOMATIC)
    assert automatic.compute_dtype == "float32" and "numbers of tokens" in automatic.compute_reason
    assert for_values(half, tiny("qwen2").manifest, ASKED) == half
    linux = replace(LINUX, llvm=True, compute_dtype=HALF)
    assert for_values(linux, manifest, ASKED) == linux


def test_on_a_cpu_weights_are_quantized_and_lie_in_a_map(tiny: Tiny) -> None:
    half, quantized = replace(LINUX, llvm=True, compute_dtype=HALF), tiny("qwen2").manifest
    floats = tiny("qwen2", "bfloat16").manifest
    sliced = replace(quantized, slice=Slice(1, 2, ""))
    for manifest, reason in (
        (sliced, "weights that workers send each other are dequantized to float32"),
        (floats, "it multiplies quantized weights, and those of this bundle are in floating point"),
    ):
        with pytest.raises(UsageError, match=f"bfloat16: {reason}; give float32"):
            for_values(half, manifest, ASKED)
        automatic = for_values(half, manifest, AUTOMATIC)
        assert automatic.compute_dtype == "float32" and reason in automatic.compute_reason
    with pytest.raises(UsageError, match="compiled code, which the machine does not run"):
        for_values(replace(half, llvm=False), quantized, ASKED)


def test_a_resumed_run_does_not_round_without_compiled_code(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as it was planned, nor planned anew: as where llvmlite has gone."""
    with monkeypatch.context() as patched:
        with_rounded_products(patched)
        run = tmp_path / "run"
        words = train_arguments(tiny("qwen2").path, run, 1, compute_dtype=HALF)
        succeeds(*words, by=here)
    monkeypatch.setattr(machine_code, "lacking", lambda: "llvmlite has gone")
    refuses(2, "llvmlite has gone", "train", "--resume", run, "--steps", 2)
    monkeypatch.setattr(compute_dtype, "lacking", lambda: "")
    said = "which the machine does not run; give float32, in a new run"
    refuses(2, said, "train", "--resume", run, "--steps", 2)


def test_a_plan_counts_rounded_factors(tiny: Tiny) -> None:
    manifest = tiny("llama").manifest
    machines = [replace(LINUX, llvm=True, compute_dtype=each) for each in ("float32", HALF)]
    widest = sum(max(each.rows, each.columns) for each in manifest.matrices.values())
    for method in ("mebp", "mezo"):
        task = task_of(32, method)
        for level in (LEVELS[3], LEVELS[-1]):
            exact, half = (
                predicted(manifest, task, level, machine=machine) for machine in machines
            )
            assert half.compiled and exact.process_bytes == half.process_bytes
            assert 0 < half.live_bytes - exact.live_bytes <= 32 * widest * BYTES
