"""The planner: what fits, what is refused, and that its promise holds in a fresh process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.bundles import Tiny
from support.layouts import STORED
from support.plans import (
    COMPILED,
    EVAL,
    LINUX,
    MAC,
    PLENTY,
    peak_model_of,
    plan_of,
    predicted,
    task_of,
)
from support.runs import ondevice, succeeds, train_arguments

from runtime.arrays.stored import FLOAT_BITS, Extent, Matrix
from runtime.bundle.manifest import Manifest, Slice
from runtime.core.errors import BudgetError, UsageError
from runtime.core.units import parse_bytes
from runtime.machine.backend import PANEL_BYTES, ROW_BYTES, cores, prepare
from runtime.machine.machine import Machine
from runtime.operations.values import F32
from runtime.plan.cost import seconds
from runtime.plan.lower import Sizes, lower
from runtime.plan.plan import Task, choose_bucket, deciding_differences
from runtime.plan.planner import MARGIN, READING_BYTES, Planner, _worth
from runtime.plan.size_levels import LEVELS
from runtime.run.session import open_session


def with_threads(threads: int) -> Machine:
    """The same machine, whose BLAS has so many."""
    return msgspec.structs.replace(LINUX, blas=msgspec.structs.replace(LINUX.blas, threads=threads))


def test_a_plan_fits_its_budget_and_more_budget_never_buys_less(tiny: Tiny) -> None:
    manifest = tiny("gemma3").manifest
    before = 0
    for megabytes in range(20, 400, 17):
        budget = megabytes * 1_000_000
        try:
            plan = plan_of(manifest, task_of(32), budget)
        except BudgetError:
            assert before == 0
            continue
        assert plan.minimum_bytes <= budget
        assert before <= plan.predicted_peak_bytes <= budget
        assert plan.predicted_peak_bytes == (
            plan.process_bytes + plan.adapter_bytes + plan.gradient_bytes
            + plan.live_bytes + plan.slack_bytes + plan.cache_bytes
            + plan.kept_bytes + plan.materialized_bytes
        )  # fmt: skip
        before = plan.predicted_peak_bytes


def test_compiled_code_needs_no_copies_and_mapped_weights_that_stay(tiny: Tiny) -> None:
    manifest, task = tiny("qwen2").manifest, task_of(32)
    without, plan = (plan_of(manifest, task, PLENTY, each) for each in (LINUX, COMPILED))
    assert (without.compiled, plan.compiled) == (False, True)
    assert plan.materialized_bytes == 0 < without.materialized_bytes
    changed = deciding_differences(without, plan)
    assert "compiled False, where True follows from the rest" in changed
    trained = task._replace(demand=replace(task.demand, trains_weights=True))
    assert not plan_of(manifest, trained, PLENTY, COMPILED).compiled
    cut = msgspec.structs.replace(manifest, slice=Slice(1, 2, "0" * 64))
    assert not plan_of(cut, task, PLENTY, COMPILED).compiled


@pytest.mark.parametrize("compiled", [False, True])
def test_a_plans_blocks_of_queries_take_time_where_attention_has_no_own(
    tiny: Tiny, compiled: bool
) -> None:
    planner = Planner(tiny("qwen2").manifest, msgspec.structs.replace(LINUX, llvm=compiled))
    lowered = (
        planner.model(task_of(32), replace(LEVELS[0], attention_block=block)).lowered
        for block in (1, 64)
    )
    few, many = (seconds(each, backward=True, lanes=1) for each in lowered)
    assert few == many if compiled else few > many


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "llama"])
def test_the_smallest_budget_is_the_smallest(tiny: Tiny, family: str) -> None:
    manifest = tiny(family).manifest
    plan = plan_of(manifest, task_of(64))
    plan_of(manifest, task_of(64), plan.minimum_bytes)
    with pytest.raises(BudgetError, match="the smallest that fits is") as refused:
        plan_of(manifest, task_of(64), int(plan.minimum_bytes * 0.99))
    assert refused.value.exit_code == 3


def test_what_costs_memory(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest

    def cost(task: Task) -> int:
        return predicted(manifest, task, LEVELS[-1]).predicted_peak_bytes

    assert cost(task_of(64)) > cost(task_of(32)) > cost(task_of(16))
    assert cost(task_of(32, accumulation=2)) > cost(task_of(32))
    assert cost(task_of(32, EVAL)) < cost(task_of(32))


def test_the_longest_sequence_bucket_is_the_limit(tiny: Tiny) -> None:
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
    family, layouts = STORED[int(rng.integers(len(STORED)))]
    length, rows = int(rng.choice([16, 40, 64])), int(rng.choice([1, 3]))
    given = {"data": "random:3", "max_seq_length": length, "batch_size": rows}
    path, run = tiny(family, layouts).path, tmp_path / "run"
    refused = ondevice(*train_arguments(path, run, 4, **{**given, "budget": "10MB"}))
    assert refused.returncode == 3, refused.stderr  # its process says what it needs
    smallest = refused.stderr.split("the smallest that fits is ")[1].split(",")[0]
    budget = smallest.strip().replace(" ", "")
    done = succeeds(*train_arguments(path, run, 4, **{**given, "budget": budget}), "--json")
    summary = json.loads(done.stdout)
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]
    assert summary["peak_footprint_bytes"] <= 1.02 * summary["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("bits", "affine", "scales"), [(4, False, 2), (4, True, 3), (8, False, 2), (8, True, 3)]
)
def test_a_tile_is_counted_with_its_words_and_scales(
    tiny: Tiny, bits: int, affine: bool, scales: int
) -> None:
    rows, columns, group = 96, 640, 64
    there = Extent(0, 1, "float32", (1,))
    layout = "affine" if affine else "symmetric"
    matrix = Matrix(rows, columns, bits, group, layout, there, there, there if affine else None)
    manifest = msgspec.structs.replace(tiny("qwen2").manifest, matrices={"one": matrix}, blocks=())
    for values, tile in ((1 << 30, rows), (20 * columns, 20)):  # whole, and fifths of it
        execution = lower(manifest, 32, Sizes(values, 16, 0), packed=False).execution
        assert execution.tile_rows == {"one": tile}
        words, codes = tile * columns * bits // 8, tile * columns
        expected = words + codes + tile * columns * F32 + scales * tile * columns // group * F32
        assert execution.largest_tile_bytes() == expected


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("dtype", "bits"), FLOAT_BITS.items())
def test_a_float_tile_is_counted_with_what_it_is_converted_from(
    tiny: Tiny, dtype: str, bits: int, packed: bool
) -> None:
    rows, columns = 96, 641
    matrix = Matrix(rows, columns, bits, 0, "float", Extent(0, 1, dtype, (1,)))
    manifest = msgspec.structs.replace(tiny("qwen2").manifest, matrices={"one": matrix}, blocks=())
    for values, tile in ((1 << 30, rows), (20 * columns, 20)):  # whole, and fifths of it
        execution = lower(manifest, 32, Sizes(values, 16, 0), packed).execution
        assert execution.tile_rows == {"one": tile}
        stored = 0 if dtype == "float32" else 2
        assert execution.largest_tile_bytes() == tile * columns * (F32 + stored)
        assert execution.tile_bytes(matrix, tile * columns) == tile * columns * F32


def test_what_the_blas_packs_is_counted(tiny: Tiny) -> None:
    manifest, task = tiny("qwen3").manifest, task_of(32)
    one, four = (
        predicted(manifest, task, LEVELS[-1], machine=with_threads(threads)) for threads in (1, 4)
    )
    more = 3 * panel(manifest) + shared_rows(manifest)
    assert four.process_bytes - one.process_bytes == more
    assert four.predicted_peak_bytes - one.predicted_peak_bytes == more


def panel(manifest: Manifest) -> int:
    """What a second thread packs of its own: no more than the largest tile there is."""
    most = peak_model_of(manifest, task_of(32), LEVELS[-1]).execution.largest_tile_bytes()
    assert 0 < most < PANEL_BYTES
    return most


def shared_rows(manifest: Manifest) -> int:
    """What several threads pack once, for all of them."""
    rows = peak_model_of(manifest, task_of(32), LEVELS[-1]).packed_rows * ROW_BYTES
    assert rows > 0
    return rows


def test_a_refusal_says_what_one_thread_would_fit(tiny: Tiny) -> None:
    manifest = tiny("qwen3").manifest
    smallest = plan_of(manifest, task_of(16)).minimum_bytes
    with pytest.raises(BudgetError, match=r"OPENBLAS_NUM_THREADS=1: each of 8 threads"):
        plan_of(manifest, task_of(16), smallest, with_threads(8))


@pytest.mark.skipif(
    prepare().blas in ("reference", "Accelerate"), reason="there is no OpenBLAS that tells"
)
def test_a_machine_is_read_with_the_threads_of_its_blas() -> None:
    source = """
import json, msgspec
from runtime.machine.backend import prepare
prepare()
import runtime.run.resume, runtime.run.start
from runtime.machine.backend import this_machine
print(json.dumps(msgspec.to_builtins(this_machine("cpu", "auto"))))
"""
    for threads in (1, 2):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        found = msgspec.convert(json.loads(done.stdout), Machine)
        several = cores() > 1
        assert found.blas == with_threads(threads if several else 1).blas
        assert (found.device, found.arithmetic) == ("cpu", "unpacked")


def test_layers_keep_the_values_of_whole_mlps(tiny: Tiny) -> None:
    """So that nothing is recomputed there; a layer that keeps nothing takes its MLP in slices."""
    manifest = tiny("gemma3", seq_lens=(1024,)).manifest
    task, layers = task_of(1024), len(manifest.layers)
    rich = plan_of(manifest, task, 10_000_000_000)
    assert rich.slice_columns and rich.kept_layers == layers
    least = plan_of(manifest, task, rich.minimum_bytes)
    assert least.slice_columns and least.kept_layers < layers
    assert rich.kept == (layers, layers, layers)
    for plan in (rich, least):  # no file holds what a layer keeps in memory
        assert plan.stored_values == layers - plan.kept_layers
    stored = (least.stored_values - rich.stored_values) * 1024 * manifest.widest * F32
    assert least.scratch_disk_bytes - rich.scratch_disk_bytes == stored > 0
    for method in ("mezo", EVAL):
        assert plan_of(manifest, task_of(1024, method), 10**10).slice_columns


def test_a_task_that_keeps_nothing_buys_nothing(tiny: Tiny) -> None:
    plan = plan_of(tiny("qwen2").manifest, task_of(32, keeps=False), 10**12)
    assert not plan.slice_columns and not plan.kept_layers and not plan.materialized_layers


def test_a_session_maps_the_values_whose_slack_is_planned_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny("llama", seq_lens=(128,))
    placed: list[int] = []
    monkeypatch.setattr("runtime.run.session.place_values", placed.append)
    smallest = plan_of(bundle.manifest, task_of(128)).minimum_bytes
    for budget in (smallest, PLENTY):
        open_session(bundle, plan_of(bundle.manifest, task_of(128), budget))
    hidden = 128 * bundle.manifest.hidden_size * F32
    assert min(placed) >= hidden


@pytest.mark.parametrize("targets", [(), ("nothing",)])
def test_nothing_to_train_is_planned_all_the_same(tiny: Tiny, targets: tuple[str, ...]) -> None:
    manifest = tiny("gemma3", seq_lens=(128,)).manifest
    manifest = manifest.with_lora(msgspec.structs.replace(manifest.lora, targets=targets))
    plan = plan_of(manifest, task_of(128))
    assert plan.adapter_bytes == plan.gradient_bytes == 0
    assert plan_of(manifest, task_of(128), plan.minimum_bytes).slice_columns


@pytest.mark.parametrize(("family", "method"), [("qwen2", "mebp"), ("gemma3", "mezo")])
def test_the_budget_that_a_refusal_names_is_accepted(
    tiny: Tiny, rng: np.random.Generator, family: str, method: str
) -> None:
    """However its figure is rounded, and though the next process reads a little more."""
    manifest, task = tiny(family).manifest, task_of(64, method)
    for process in (1_174_567_890, int(rng.integers(2e7, 5e9))):
        machine = msgspec.structs.replace(LINUX, process_bytes=process)
        with pytest.raises(BudgetError, match="the smallest that fits is ") as refused:
            plan_of(manifest, task, 1_000_000, machine)
        named = str(refused.value).split("the smallest that fits is ")[1].split(",")[0]
        grown = msgspec.structs.replace(machine, process_bytes=process + READING_BYTES)
        assert plan_of(manifest, task, parse_bytes(named), grown).minimum_bytes


@pytest.mark.parametrize(
    ("family", "machine", "method"),
    [("gemma3", LINUX, "mebp"), ("gemma3", LINUX, "mezo"), ("gemma3", LINUX, EVAL),
     ("gemma3", MAC, "mebp"), ("qwen3-moe", LINUX, "mebp"), ("qwen3_5", LINUX, "mebp")],
)  # fmt: skip
def test_a_plan_follows_from_its_own_choices(
    tiny: Tiny, family: str, machine: Machine, method: str
) -> None:
    """In a process of any size, with any number of threads: but for the smallest budget."""
    manifest, task = tiny(family).manifest, task_of(64, method, rows=2)
    smallest = plan_of(manifest, task, PLENTY, machine).minimum_bytes
    blas = msgspec.structs.replace(machine.blas, threads=3)
    other = msgspec.structs.replace(machine, process_bytes=1_000_000, blas=blas)
    for budget in (smallest, 2 * smallest, PLENTY):
        plan = plan_of(manifest, task, budget, machine)
        assert Planner(manifest, machine).again(plan, task) == plan
        assert not deciding_differences(plan, Planner(manifest, other).again(plan, task))


@pytest.mark.parametrize(
    ("family", "method", "compiled"),
    [("qwen2", "mebp", False), ("qwen2", "mebp", True), ("gemma3", "mebp", True),
     ("qwen2", "mezo", False)],
)  # fmt: skip
def test_more_budget_never_buys_a_slower_plan(
    tiny: Tiny, family: str, method: str, compiled: bool
) -> None:
    manifest, task = tiny(family, seq_lens=(256,)).manifest, task_of(256, method)
    planner = Planner(manifest, msgspec.structs.replace(LINUX, llvm=compiled))
    least = planner.plan(task, PLENTY).minimum_bytes
    before = math.inf
    known = set()
    for budget in np.geomspace(least, 2 * least, 40):
        plan = planner.plan(task, int(budget) + 1)
        known.add((plan.tile_values, *plan.kept, plan.materialized_layers))
        now = planner.seconds(task, plan, plan.lanes)
        assert now <= before
        before = now
    assert len(known) >= 3  # so that there was something to compare


def test_sizes_are_those_of_the_task_that_is_asked_for(tiny: Tiny) -> None:
    planner = Planner(tiny("qwen2").manifest, LINUX)
    for task in (task_of(32), task_of(64), task_of(64, "mezo"), task_of(32)):
        model = planner.model(task, LEVELS[0])
        assert (model.lowered.bucket, model.demand) == (task.request.bucket, task.demand)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_budget_is_spent_to_the_last_layer_that_fits(tiny: Tiny, family: str) -> None:
    """Layers keep values one after another; what layers keep of their MLPs depends on bytes."""
    manifest, task = tiny(family, seq_lens=(256,)).manifest, task_of(256)
    planner = Planner(manifest, COMPILED)
    most = planner.plan(task, PLENTY)
    known = set()
    for budget in np.linspace(most.minimum_bytes, 1.1 * most.predicted_peak_bytes, 40):
        plan = planner.plan(task, int(budget) + 1)
        known.add(plan.kept)
        steps = planner._steps(task, plan.sizes, plan.lanes)
        assert plan.kept in steps
        for kept in steps[steps.index(plan.kept) + 1 :]:
            more = planner._with(task, plan.sizes, plan, kept, 0, False).kept_bytes
            assert plan.predicted_peak_bytes - plan.kept_bytes + more > MARGIN * budget - 1
    assert plan.kept == (len(manifest.layers),) * 3
    assert len(known) > len(manifest.layers)


@pytest.mark.parametrize(
    ("savings", "stops"),
    [
        ([(4.0, 2), (3.0, 3), (1.0, 4)], [1, 2, 3]),
        ([(1.0, 2), (9.0, 3), (1.0, 4)], [2, 3]),  # the second is worth more than the first
        ([(1.0, 2), (2.0, 2), (4.0, 2)], [3]),
        ([(4.0, 2), (-1.0, 3)], [1]),  # the second would cost time
        ([(0.0, 0)], []),
        ([(1.0, 0), (1.0, 1)], [1, 2]),
    ],
)
def test_ways_to_keep_values_are_taken_by_what_they_save_for_a_byte(
    savings: list[tuple[float, int]], stops: list[int]
) -> None:
    assert _worth(savings) == stops
