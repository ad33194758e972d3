"""What the C library's heap keeps beyond what is alive: each of the machine's values.

What the values are is measured (`ondevice bench machine`); here is what the planner makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.bundles import Tiny
from support.plans import LINUX, MAC, PLENTY, peak_model_of, plan_of, predicted, task_of
from support.random_types import random_bundle

from runtime.bundle.manifest import Manifest
from runtime.machine.glibc import unused_bytes
from runtime.machine.machine import Heap, Machine
from runtime.operations.execution import materialized_bytes
from runtime.operations.values import F32
from runtime.plan.allocator import heap_use, with_kept
from runtime.plan.lower import Sizes
from runtime.plan.plan import Plan, Task

NOTHING = Heap(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SIZES = Sizes(2048, 16, 0, slices=True)


def with_heap(**values: float) -> Machine:
    return msgspec.structs.replace(LINUX, heap=msgspec.structs.replace(NOTHING, **values))


def slack(manifest: Manifest, task: Task, sizes: Sizes, **values: float) -> int:
    """What the heap keeps where only these of its values are not 0."""
    return predicted(manifest, task, sizes, machine=with_heap(**values)).slack_bytes


def beside(plan: Plan) -> int:
    """What is alive, with the adapters and gradients of a layer."""
    return plan.live_bytes + plan.adapter_bytes + plan.gradient_bytes


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_slack_is_flat_and_a_share_of_what_is_alive(tiny: Tiny, method: str) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, method)
    none = predicted(manifest, task, SIZES, machine=with_heap())
    assert none.slack_bytes == 0
    assert slack(manifest, task, SIZES, flat_bytes=12_345) == 12_345
    tenth, fifth = (slack(manifest, task, SIZES, share=share) for share in (0.1, 0.2))
    assert 0 < tenth < 0.1 * beside(none)  # the current tile is one block and leaves no holes
    assert fifth == pytest.approx(2 * tenth, abs=2)
    both = slack(manifest, task, SIZES, flat_bytes=12_345, share=0.1)
    assert both == 12_345 + tenth
    backward = slack(manifest, task, SIZES, share=0.1, share_of_backward=0.1)
    assert backward == (fifth if method == "mebp" else tenth)


def test_a_larger_tile_is_no_part_of_what_is_shared(tiny: Tiny) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, "mezo")
    for sizes in (SIZES, replace(SIZES, tile_values=1 << 20)):
        plan = predicted(manifest, task, sizes, machine=with_heap(share=1.0))
        tile = peak_model_of(manifest, task, sizes).execution.largest_tile_bytes()
        assert plan.slack_bytes <= beside(plan) - tile


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_values_that_are_mapped_leave_fewer_holes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024, method)
    whole = replace(SIZES, slices=False)
    values = {"share": 0.5, "share_beside_mapped": 0.1}
    before = [slack(manifest, task, sizes, **values) for sizes in (SIZES, whole)]
    longest = peak_model_of(manifest, task, SIZES).mapped_value
    monkeypatch.setattr("runtime.machine.glibc.LONG_VALUE_BYTES", longest)
    tiled, untiled = (slack(manifest, task, sizes, **values) for sizes in (SIZES, whole))
    assert tiled == pytest.approx(before[0] / 5, abs=2)
    assert untiled == before[1]  # nothing is mapped where an MLP's values are whole
    monkeypatch.setattr("runtime.machine.glibc.LONG_VALUE_BYTES", longest + 1)
    assert slack(manifest, task, SIZES, **values) == before[0]


def test_logits_leave_a_share_of_a_chunk_unless_they_are_mapped(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,)).manifest, task_of(1024)
    model = peak_model_of(manifest, task, SIZES)
    logits, last = 1024 * model.execution.chunk_rows * F32, len(manifest.blocks) - 1
    assert slack(manifest, task, SIZES, share_of_logits=0.5) == logits // 2
    assert slack(manifest, task_of(1024, "mezo"), SIZES, share_of_logits=0.5) == 0
    heap = with_heap(share_of_logits=0.5).heap
    assert unused_bytes(heap, heap_use(model, 10**6, last)) == logits // 2
    for index in (0, last):  # also while a layer runs, they have left no hole
        use = heap_use(model, 10**6, index)
        with monkeypatch.context() as patched:
            patched.setattr("runtime.machine.glibc.MOST_HEAP_BLOCK_BYTES", logits - 1)
            assert unused_bytes(heap, use) == 0
        with monkeypatch.context() as patched:  # so where long values are mapped, too
            patched.setattr("runtime.machine.glibc.LONG_VALUE_BYTES", logits)
            for values, holes in ((2 * logits, logits // 2), (2 * logits - 2, 0)):
                assert unused_bytes(heap, replace(use, value_bytes=values)) == holes


@pytest.mark.parametrize(
    ("stored", "tiled"), [({}, False), ({"trainable": "full", "storage": "bfloat16"}, True)]
)
def test_tiles_leave_holes_where_compiled_code_takes_no_matrix(
    tiny: Tiny, stored: dict[str, str], tiled: bool
) -> None:
    manifest, task = tiny("gemma3", seq_lens=(1024,), **stored).manifest, task_of(1024)
    machine = with_heap(share_of_backward=0.5, share_of_logits=0.5)
    compiled = msgspec.structs.replace(machine, llvm=True)
    assert predicted(manifest, task, SIZES, machine=machine).slack_bytes > 0
    assert (predicted(manifest, task, SIZES, machine=compiled).slack_bytes > 0) == tiled


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_wider_values_do_not_fit_holes_of_hidden_states_unless_they_are_mapped(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    manifest, task = tiny("lfm2", seq_lens=(1024,)).manifest, task_of(1024, method)
    wider = 1024 * 2 * manifest.hidden_size * F32  # the convolutions' three parts, less one
    times = {"mebp": 2, "mezo": 1}[method]
    assert slack(manifest, task, SIZES, share_of_wider=0.25) == times * wider // 4
    monkeypatch.setattr("runtime.machine.glibc.LONG_VALUE_BYTES", wider)
    assert slack(manifest, task, SIZES, share_of_wider=0.25) == 0


def test_what_is_kept_has_a_share_of_its_own_and_what_is_materialized_none(tiny: Tiny) -> None:
    manifest, task = tiny("qwen2").manifest, task_of(64, rows=2)
    bare, kept = (
        plan_of(manifest, task, PLENTY, with_heap(share_of_kept=share)) for share in (0.0, 0.5)
    )
    assert bare.kept_layers == kept.kept_layers == len(manifest.layers)
    assert kept.kept_bytes == pytest.approx(1.5 * bare.kept_bytes, rel=1e-6)
    assert kept.materialized_layers == bare.materialized_layers == len(manifest.layers)
    weights = [m for block in manifest.layers for m in manifest.matrices_of(block)]
    assert bare.materialized_bytes == sum(map(materialized_bytes, weights))
    assert kept.materialized_bytes == bare.materialized_bytes


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_gate_and_up_in_one_value_leave_a_hole_beside_what_is_kept(
    tmp_path: Path, model_type: str
) -> None:
    manifest, task = random_bundle(tmp_path, model_type).manifest, task_of(64)
    model = peak_model_of(manifest, task, SIZES)
    machine, live = with_heap(share_of_kept=0.25), 1_000_000
    assert with_kept(machine, model, live, (2, 0, 0)) == live + live // 4
    width = manifest.matrices["model.layers.0.mlp.down_proj"].columns
    of_halves = live // 4 + 64 * width * F32 if model_type == "phi3" else 0
    assert with_kept(machine, model, live, (2, 1, 0)) == live + live // 4 + of_halves
    assert with_kept(with_heap(), model, live, (2, 1, 0)) == live


def test_mlx_s_own_allocator_has_no_heap(tiny: Tiny) -> None:
    manifest, task = tiny("gemma3").manifest, task_of(64)
    large = Heap(10**9, 9.0, 9.0, 9.0, 9.0)
    with_one = msgspec.structs.replace(MAC, heap=large)
    assert plan_of(manifest, task, PLENTY, with_one) == plan_of(manifest, task, PLENTY, MAC)
