"""The heap's slack in a plan: what freed memory leaves between blocks in use, where, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans import peak_model_of, predicted, task_of

from ondevice.bundle.store import Bundle
from ondevice.operations.base import WHOLE
from ondevice.operations.values import F32
from runtime.lowering.lower import Sizes
from runtime.planner.allocators.glibc import SMALL_TILE_BYTES, slack_of
from runtime.planner.plan import LEVELS

Tiny = Callable[..., Bundle]


@pytest.mark.parametrize(
    ("method", "most", "per_doubling"),
    [("mebp", 64, 0.03), ("mebp", WHOLE, 0.12), ("mezo", WHOLE, 0.01)],
)
def test_large_values_leave_larger_holes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str, most: int, per_doubling: float
) -> None:
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    task, sizes = task_of(1024, method), Sizes(2048, 16, 0, most_tokens=most)
    model = peak_model_of(manifest, task, sizes)
    largest = model.largest_value() if most == WHOLE else model.largest_whole_value
    assert model.execution.largest_tile_bytes() < largest // 4  # no room for it where the tile was
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_TILE_BYTES", 0)
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_VALUE_BYTES", 2 * largest)
    small, before = slack_of(model), predicted(manifest, task, sizes)
    monkeypatch.setattr("runtime.planner.allocators.glibc.SMALL_VALUE_BYTES", largest // 4)
    large, after = slack_of(model), predicted(manifest, task, sizes)
    assert large.share - small.share == pytest.approx(2 * per_doubling, rel=1e-3)
    assert after.live_bytes == before.live_bytes
    alive = after.live_bytes + after.adapter_bytes + after.gradient_bytes
    assert 0 < after.slack_bytes - before.slack_bytes < 2 * per_doubling * alive


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_values_that_are_mapped_leave_no_holes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, method)
    tiled = peak_model_of(manifest, task, Sizes(2048, 16, 0, most_tokens=64))
    whole = peak_model_of(manifest, task, Sizes(2048, 16, 0))
    before, as_before = slack_of(tiled), slack_of(whole)
    monkeypatch.setattr("runtime.planner.allocators.glibc.LONG_VALUE_BYTES", tiled.mapped_value)
    assert slack_of(tiled).share < before.share
    assert slack_of(whole) == as_before


def test_large_tiles_leave_larger_holes_in_a_forward(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, "mezo")
    model = peak_model_of(manifest, task, LEVELS[0])
    small, before = slack_of(model), predicted(manifest, task, LEVELS[0])
    monkeypatch.setattr(
        "runtime.planner.allocators.glibc.SMALL_TILE_BYTES", model.execution.largest_tile_bytes()
    )
    large, after = slack_of(model), predicted(manifest, task, LEVELS[0])
    assert large.flat_bytes > small.flat_bytes and large.share >= small.share
    assert after.live_bytes == before.live_bytes and after.slack_bytes > before.slack_bytes


def test_an_mlp_in_a_forward_leaves_small_holes_where_it_fits_a_tile(tiny: Tiny) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, "mezo")
    shares = []
    for most_tokens in (64, 1024):
        model = peak_model_of(manifest, task, replace(LEVELS[-1], most_tokens=most_tokens))
        tile, value = model.execution.largest_tile_bytes(), model.largest_tiled_value
        assert tile < SMALL_TILE_BYTES
        shares.append((value <= tile and value > 0, slack_of(model).share))
    assert [fits for fits, _ in shares] == [True, False]
    assert shares[1][1] - shares[0][1] >= 0.04


def test_tiles_of_tokens_lie_between_holes_of_whole_values(tiny: Tiny) -> None:
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    sizes = replace(LEVELS[-1], most_tokens=64)
    tiled = peak_model_of(manifest, task_of(1024), sizes)
    value = tiled.largest_whole_value
    assert 1024 * manifest.hidden_size * F32 <= value <= tiled.largest_value()
    whole = peak_model_of(manifest, task_of(1024), replace(sizes, most_tokens=WHOLE))
    assert value < whole.largest_whole_value == whole.largest_value()
    slack = predicted(manifest, task_of(1024), sizes).slack_bytes
    assert slack >= value or slack >= tiled.block(1, 1).backward_bytes // 4
