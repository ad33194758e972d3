"""The planner: what fits, what is refused, and that its promise holds in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ondevice.bundle.manifest import Manifest
from ondevice.bundle.store import Bundle
from ondevice.errors import BudgetError, UsageError
from ondevice.operations.base import WHOLE
from ondevice.operations.tensors import Extent, Matrix
from ondevice.operations.values import F32, Sizes, Work, Workspace
from runtime.planner.allocators.glibc import SMALL_TILE_BYTES, slack_of
from runtime.planner.peak import Liveness
from runtime.planner.plan import (
    BLAS_BYTES_PER_ROW,
    BLAS_BYTES_PER_THREAD,
    LEVELS,
    LONG_TOKENS,
    MARGIN,
    choose_bucket,
    make_plan,
    predict,
)
from runtime.run.open import open_session
from runtime.system.backend import blas_threads, prepare

Tiny = Callable[..., Bundle]


def test_a_plan_fits_its_budget_and_more_budget_never_buys_less(tiny: Tiny) -> None:
    manifest = tiny("gemma3").manifest
    before = 0
    for megabytes in range(20, 400, 7):
        budget = megabytes * 1_000_000
        try:
            plan = make_plan(manifest, Work(32), budget)
        except BudgetError:
            assert before == 0
            continue
        assert plan.minimum_bytes <= budget
        assert before <= plan.predicted_peak_bytes <= budget
        assert plan.predicted_peak_bytes == (
            plan.base_bytes + plan.adapter_bytes + plan.gradient_bytes
            + plan.live_bytes + plan.slack_bytes + plan.cache_bytes
            + plan.kept_bytes + plan.resident_bytes
        )  # fmt: skip
        before = plan.predicted_peak_bytes


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "llama"])
def test_the_smallest_budget_is_the_smallest(tiny: Tiny, family: str) -> None:
    manifest = tiny(family).manifest
    plan = make_plan(manifest, Work(64), 1_000_000_000)
    make_plan(manifest, Work(64), plan.minimum_bytes)
    with pytest.raises(BudgetError, match="the smallest that fits is") as refused:
        make_plan(manifest, Work(64), int(plan.minimum_bytes * 0.99))
    assert refused.value.exit_code == 3


def test_what_costs_memory(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest
    work = Work(32)

    def cost(changed: Work) -> int:
        return predict(manifest, changed, LEVELS[-1], 0, 0).predicted_peak_bytes

    assert cost(replace(work, bucket=64)) > cost(work) > cost(replace(work, bucket=16))
    assert cost(replace(work, accumulation=2)) > cost(work)
    assert cost(replace(work, method="eval")) < cost(work)


def test_the_ladder_is_the_limit(tiny: Tiny) -> None:
    manifest = tiny("llama").manifest
    assert choose_bucket(manifest, 1) == manifest.buckets[0]
    for bucket in manifest.buckets:
        assert choose_bucket(manifest, bucket) == bucket
    with pytest.raises(UsageError, match="--seq-lens"):
        choose_bucket(manifest, manifest.buckets[-1] + 1)


def test_measured_is_never_far_over_predicted(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path
) -> None:
    """A fresh process, at random settings: the peak stays below prediction + 2 % and budget."""
    family = str(rng.choice(["qwen2", "qwen3", "gemma3", "llama"]))
    length, rows = int(rng.choice([16, 40, 64])), int(rng.choice([1, 3]))
    bundle = tiny(family)
    work = Work(64, rows, threads=blas_threads())
    smallest = make_plan(bundle.manifest, work, 1_000_000_000).minimum_bytes
    done = subprocess.run(
        [
            sys.executable, "-m", "ondevice", "train", str(bundle.path), "--data=random:3",
            f"--max-seq-length={length}", f"--batch-size={rows}", "--steps=4", "--json",
            f"--budget={smallest}", f"--output={tmp_path / 'run'}",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, (family, length, rows, done.stderr)
    summary = json.loads(done.stdout)
    assert summary["peak_footprint_bytes"] <= smallest
    assert summary["peak_footprint_bytes"] <= 1.02 * summary["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("bits", "affine", "scales"), [(4, False, 3), (4, True, 4), (8, False, 1), (8, True, 2)]
)
def test_a_tile_is_counted_with_its_words_and_scales(
    tiny: Tiny, bits: int, affine: bool, scales: int
) -> None:
    rows, columns, group = 96, 640, 64
    there = Extent(0, 1, "float32", (1,))
    layout = "affine" if affine else "symmetric"
    matrix = Matrix(rows, columns, bits, group, layout, there, there, there if affine else None)
    manifest = replace(tiny("qwen2").manifest, matrices={"one": matrix})
    for values, opened in ((1 << 30, rows), (20 * columns, 20)):  # whole, and fifths of it
        workspace = Workspace(manifest, Work(32), Sizes(values, 16, 0))
        words = 3 * opened * columns * bits // 8
        expected = words + opened * columns * F32 + scales * opened * columns // group * F32
        assert workspace.largest_tile() == expected


def test_what_the_blas_packs_is_counted(tiny: Tiny) -> None:
    manifest = tiny("qwen3").manifest
    one = predict(manifest, Work(32), LEVELS[-1], 0, 0)
    four = predict(manifest, Work(32, threads=4), LEVELS[-1], 0, 0)
    assert four.base_bytes - one.base_bytes == 3 * panel(manifest) + shared_rows(
        manifest, LEVELS[-1]
    )


def panel(manifest: Manifest) -> int:
    """What a second thread packs of its own: no more than the largest tile there is."""
    most = Liveness(manifest, Work(32), LEVELS[-1]).workspace.largest_tile()
    assert 0 < most < BLAS_BYTES_PER_THREAD
    return most


def shared_rows(manifest: Manifest, level: Sizes) -> int:
    """What several threads pack once, for all of them."""
    rows = Liveness(manifest, Work(32), level).packed_rows() * BLAS_BYTES_PER_ROW
    assert rows > 0
    return rows


@pytest.mark.parametrize(
    ("method", "most", "per_doubling"),
    [("mebp", 64, 0.03), ("mebp", WHOLE, 0.12), ("mezo", WHOLE, 0.01)],
)
def test_large_values_leave_larger_holes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str, most: int, per_doubling: float
) -> None:
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    work, sizes = Work(1024, method=method), Sizes(2048, 16, 0, most_tokens=most)
    model = Liveness(manifest, work, sizes)
    largest = model.largest_value() if most == WHOLE else model.largest_whole_value()
    assert model.workspace.largest_tile() < largest // 4  # no room for it where the tile was
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_TILE_BYTES", 0)
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_VALUE_BYTES", 2 * largest)
    small, before = slack_of(model), predict(manifest, work, sizes, 0, 0)
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_VALUE_BYTES", largest // 4)
    large, after = slack_of(model), predict(manifest, work, sizes, 0, 0)
    assert large.share - small.share == pytest.approx(2 * per_doubling, rel=1e-3)
    assert after.live_bytes == before.live_bytes
    alive = after.live_bytes + after.adapter_bytes + after.gradient_bytes
    assert 0 < after.slack_bytes - before.slack_bytes < 2 * per_doubling * alive


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_values_that_are_mapped_leave_no_holes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manifest, work = tiny("gemma3", seq_lens=(1024,)).manifest, Work(1024, method=method)
    tiled = Liveness(manifest, work, Sizes(2048, 16, 0, most_tokens=64))
    whole = Liveness(manifest, work, Sizes(2048, 16, 0))
    before, as_before = slack_of(tiled), slack_of(whole)
    monkeypatch.setattr("runtime.planner.allocators.glibc.LONG_VALUE_BYTES", tiled.mapped_value())
    assert slack_of(tiled).share < before.share
    assert slack_of(whole) == as_before


def test_large_tiles_leave_larger_holes_in_a_forward(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, work = tiny("gemma3", seq_lens=(1024,)).manifest, Work(1024, method="mezo")
    model = Liveness(manifest, work, LEVELS[0])
    small, before = slack_of(model), predict(manifest, work, LEVELS[0], 0, 0)
    monkeypatch.setattr(
        "runtime.planner.allocators.glibc.SMALL_TILE_BYTES", model.workspace.largest_tile()
    )
    large, after = slack_of(model), predict(manifest, work, LEVELS[0], 0, 0)
    assert large.flat_bytes > small.flat_bytes and large.share >= small.share
    assert after.live_bytes == before.live_bytes and after.slack_bytes > before.slack_bytes


def test_an_mlp_in_a_forward_leaves_small_holes_where_it_fits_a_tile(tiny: Tiny) -> None:
    manifest, work = tiny("gemma3", seq_lens=(1024,)).manifest, Work(1024, method="mezo")
    shares = []
    for most_tokens in (64, 1024):
        model = Liveness(manifest, work, replace(LEVELS[-1], most_tokens=most_tokens))
        tile, value = model.workspace.largest_tile(), model.largest_tiled_value()
        assert tile < SMALL_TILE_BYTES
        shares.append((value <= tile and value > 0, slack_of(model).share))
    assert [fits for fits, _ in shares] == [True, False]
    assert shares[1][1] - shares[0][1] >= 0.04


def test_a_refusal_says_what_one_thread_would_fit(tiny: Tiny) -> None:
    manifest = tiny("qwen3").manifest
    smallest = make_plan(manifest, Work(16), 1_000_000_000).minimum_bytes
    with pytest.raises(BudgetError, match=r"OPENBLAS_NUM_THREADS=1: each of 8 threads"):
        make_plan(manifest, Work(16, threads=8), smallest)


@pytest.mark.skipif(
    prepare().blas in ("reference", "Accelerate"), reason="there is no OpenBLAS that tells"
)
def test_the_plan_knows_how_many_threads_the_blas_has(tiny: Tiny) -> None:
    command = [sys.executable, "-m", "ondevice", "plan", str(tiny("qwen3").path), "--json"]
    command += ["--max-seq-length=32", "--budget=1GB"]
    found = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["base_bytes"])
    manifest = tiny("qwen3").manifest
    several = len(os.sched_getaffinity(0)) > 1
    more = panel(manifest) + shared_rows(manifest, LEVELS[0]) if several else 0
    assert found[1] - found[0] == more


def test_long_rows_go_whole_through_an_mlp_only_where_nothing_is_recomputed(tiny: Tiny) -> None:
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    work, layers = Work(1024), len(manifest.layers)
    rich = make_plan(manifest, work, 10_000_000_000)
    assert (rich.token_tile, rich.kept_layers) == (1024, layers)
    enough = rich.predicted_peak_bytes - rich.resident_bytes
    tiled = make_plan(manifest, work, int(0.98 * enough / MARGIN))
    assert tiled.token_tile == LONG_TOKENS and tiled.kept_layers
    least = make_plan(manifest, work, tiled.minimum_bytes)
    assert least.token_tile == 64 and not least.kept_layers
    for method in ("mezo", "eval"):
        assert make_plan(manifest, Work(1024, method=method), 10**10).token_tile == LONG_TOKENS


def test_tiles_of_tokens_lie_between_holes_of_whole_values(tiny: Tiny) -> None:
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    sizes = replace(LEVELS[-1], most_tokens=64)
    tiled = Liveness(manifest, Work(1024), sizes)
    value = tiled.largest_whole_value()
    assert 1024 * manifest.hidden_size * F32 <= value <= tiled.largest_value()
    whole = Liveness(manifest, Work(1024), replace(sizes, most_tokens=WHOLE))
    assert value < whole.largest_whole_value() == whole.largest_value()
    slack = predict(manifest, Work(1024), sizes, 0, 0).slack_bytes
    assert slack >= value or slack >= tiled.block(1, 1).backward_bytes // 4


def test_the_papers_plan_buys_nothing(tiny: Tiny) -> None:
    plan = make_plan(tiny("qwen2").manifest, Work(32, layout="paper"), 10**12)
    assert plan.hold and not plan.kept_layers and not plan.resident_layers


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_the_papers_head_is_opened_once(tiny: Tiny, method: str) -> None:
    manifest = tiny("qwen2").manifest
    plan = make_plan(manifest, Work(64, layout="paper", method=method), 10**12)
    values = manifest.vocab_size * manifest.hidden_size * F32
    logits = 64 * manifest.vocab_size * F32
    hidden = 64 * manifest.hidden_size * F32
    most = 1.9 * values + 3 * logits + 6 * hidden
    assert values + logits < plan.blocks[-1].forward_bytes < most


def test_a_session_maps_the_values_whose_slack_is_planned_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny("llama", seq_lens=(128,))
    placed: list[int] = []
    monkeypatch.setattr("runtime.run.open.place_values", placed.append)
    smallest = make_plan(bundle.manifest, Work(128), 10**9).minimum_bytes
    for budget in (smallest, 10**9):
        open_session(bundle, make_plan(bundle.manifest, Work(128), budget))
    hidden = 128 * bundle.manifest.hidden_size * F32
    assert placed[0] >= hidden  # an MLP runs by tiles of tokens
    assert placed[1] == 0


def test_a_short_row_takes_no_more_than_was_planned(tiny: Tiny) -> None:
    """Tiles do not divide 97 tokens, which run at 100, in tiles of 50."""
    bundle = tiny("llama", seq_lens=(32, 97, 100, 128))
    for most in (WHOLE, 64):
        sizes = replace(LEVELS[-1], most_tokens=most)
        plan = predict(bundle.manifest, Work(128), sizes, 10**9, 0)
        session = open_session(bundle, plan)
        assert tuple(session.model(n).bucket for n in (30, 33, 98, 101)) == (32, 100, 100, 128)


@pytest.mark.parametrize("targets", [[], ["nothing"]])
def test_nothing_to_train_is_planned_all_the_same(tiny: Tiny, targets: list[str]) -> None:
    manifest = tiny("gemma3", seq_lens=(128,)).manifest
    manifest = replace(manifest, lora={**manifest.lora, "targets": targets})
    for dtype in ("float32", "bfloat16"):
        plan = make_plan(manifest, Work(128, adapter_dtype=dtype), 10**9)
        assert plan.adapter_bytes == plan.gradient_bytes == 0
        assert make_plan(manifest, Work(128), plan.minimum_bytes).token_tile == 64
