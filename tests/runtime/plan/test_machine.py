"""Plans for machines that are not this one: a Mac's, made on Linux; and those in files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from support.bundles import Tiny
from support.plans import EVAL, LINUX, MAC, plan_of, predicted, task_of
from support.runs import json_of, ondevice, refuses

from ondevice.cli.describe import describe_plan
from runtime.arrays.stored import PAGE
from runtime.core.errors import BudgetError, UsageError
from runtime.machine import footprint
from runtime.machine.machine import Blas, Heap, Machine, read_machine
from runtime.operations.linear import SPLIT_BYTES, SPLIT_COLUMNS, split_bytes
from runtime.operations.values import F32
from runtime.plan.allocator import ARRAYS
from runtime.plan.lower import MOST_CHUNKS
from runtime.plan.plan import Plan, Task
from runtime.plan.planner import Planner
from runtime.plan.size_levels import LEVELS, OPERATIONS, PACKED

TASKS = {
    "mebp": task_of(64, rows=2),
    "mezo": task_of(64, "mezo", queries=2),
    EVAL: task_of(64, EVAL),
}


def differing(one: Plan, other: Plan) -> set[str]:
    return {name for name in Plan.__struct_fields__ if getattr(one, name) != getattr(other, name)}


def on(machine: Machine, **fields: object) -> Machine:
    return msgspec.structs.replace(machine, **fields)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_block_or_an_operation_is_one_evaluation_on_a_gpu_where_it_fits(
    tiny: Tiny, task: Task
) -> None:
    """Nothing is freed before it ends, so it takes more than parts that end one by one."""
    manifest = tiny("gemma3").manifest
    plan = plan_of(manifest, task, 300_000_000, MAC)
    assert plan.evaluation == "block" and not plan.slice_columns
    assert math.ceil(manifest.vocab_size / plan.chunk_rows) <= MOST_CHUNKS
    assert "each block evaluated once" in describe_plan(plan.to_json())
    assert Planner(manifest, MAC).again(plan, task) == plan
    less = predicted(manifest, task, OPERATIONS[0], 0, task.demand.lanes[0], MAC)
    assert less.live_bytes < plan.live_bytes
    between = plan_of(manifest, task, int(less.predicted_peak_bytes / 0.95) + 1, MAC)
    assert between.evaluation == "operation" and between.lanes >= task.demand.lanes[0]
    assert "each operation evaluated once" in describe_plan(between.to_json())
    assert Planner(manifest, MAC).again(between, task) == between
    frugal = plan_of(manifest, task, plan.minimum_bytes, MAC)
    assert frugal.evaluation == "part" and frugal.live_bytes < less.live_bytes
    assert "evaluated once" not in describe_plan(frugal.to_json())
    assert frugal.slack_bytes == ARRAYS * PAGE + SPLIT_BYTES
    for other in (LINUX, on(MAC, arithmetic="unpacked")):
        assert plan_of(manifest, task, 300_000_000, other).evaluation == "part"
    cuda = plan_of(manifest, task, 300_000_000, on(MAC, allocator="mlx"))
    assert cuda.evaluation == "block" and cuda.slack_bytes == 0


def test_graphs_that_do_not_say_what_they_allocate_are_not_one_evaluation(tiny: Tiny) -> None:
    manifest, task = tiny("gemma3").manifest, TASKS["mebp"]
    graphs = {
        key: msgspec.structs.replace(graph, allocated_bytes=None)
        for key, graph in manifest.graphs.items()
    }
    silent = msgspec.structs.replace(manifest, graphs=graphs)
    assert plan_of(silent, task, 300_000_000, MAC).evaluation == "part"


def test_what_a_gpu_holds_besides_a_small_product_is_bounded(tiny: Tiny) -> None:
    """A split product has two parts at least; a product larger than half the bound has none."""
    matrix = next(iter(tiny("gemma3").manifest.matrices.values()))
    parts = matrix.columns // SPLIT_COLUMNS
    assert split_bytes(matrix, 1000) == 1000 * parts
    assert split_bytes(matrix, SPLIT_BYTES // 2) == min(SPLIT_BYTES, SPLIT_BYTES // 2 * parts)
    assert split_bytes(matrix, SPLIT_BYTES // 2 + 1) == 0


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_plan_for_a_mac_is_made_here(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    """Of the machine that is given, and of nothing that this one is."""
    monkeypatch.setattr(footprint, "read_footprint", lambda: pytest.fail("this process was read"))
    plan = plan_of(tiny("gemma3").manifest, task, 300_000_000, MAC)
    assert plan.arithmetic == "packed"
    assert plan.cache_bytes > 0 and plan.slack_bytes == ARRAYS * PAGE
    assert plan.materialized_layers == len(tiny("gemma3").manifest.layers)  # packed
    assert plan.materialized_head and plan.materialized_bytes > 0
    assert plan.process_bytes >= MAC.process_bytes
    assert plan.tile_values == PACKED[0].tile_values
    assert plan.predicted_peak_bytes == (
        plan.process_bytes + plan.adapter_bytes + plan.gradient_bytes
        + plan.live_bytes + plan.slack_bytes + plan.cache_bytes + plan.kept_bytes
        + plan.materialized_bytes
    )  # fmt: skip
    plan_of(tiny("gemma3").manifest, task, plan.minimum_bytes, MAC)
    with pytest.raises(BudgetError):
        plan_of(tiny("gemma3").manifest, task, int(0.99 * plan.minimum_bytes), MAC)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_each_fact_of_a_machine_changes_its_own_part_of_a_plan(tiny: Tiny, task: Task) -> None:
    manifest, sizes = tiny("gemma3").manifest, LEVELS[-1]

    def planned(machine: Machine) -> Plan:
        return predicted(manifest, task, sizes, machine=machine)

    here = planned(LINUX)
    assert here.slack_bytes > 0 and here.cache_bytes == 0
    larger = planned(on(LINUX, process_bytes=LINUX.process_bytes + 18_000_000))
    assert differing(here, larger) == {"process_bytes", "predicted_peak_bytes"}
    assert larger.predicted_peak_bytes - here.predicted_peak_bytes == 18_000_000

    cached = planned(on(LINUX, allocator="mlx"))
    freed = {"slack_bytes", "cache_bytes", "predicted_peak_bytes", "evaluation_lanes"}
    assert {"slack_bytes", "cache_bytes"} <= differing(here, cached) <= freed
    assert cached.slack_bytes == 0 and 0 < cached.cache_bytes <= sizes.cache_bytes

    packed = planned(on(LINUX, arithmetic="packed"))
    adapters = ("adapter_bytes", "gradient_bytes", "scratch_disk_bytes", "bucket", "rows")
    assert not differing(here, packed) & set(adapters)
    assert packed.arithmetic == "packed"

    on_gpu = planned(on(LINUX, device="gpu"))  # runs graphs where a CPU has kernels
    same = {*adapters, "arithmetic", "tile_values"} - {"scratch_disk_bytes"}
    assert not differing(here, on_gpu) & same
    hidden = here.rows * here.bucket * manifest.hidden_size * F32
    stored = here.stored_values * hidden  # of MLPs in slices
    assert on_gpu.scratch_disk_bytes == here.scratch_disk_bytes - stored
    assert here.blocks != on_gpu.blocks


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_plan_is_of_the_machine_s_device_wherever_graphs_were_traced(
    tiny: Tiny, task: Task
) -> None:
    manifest = tiny("gemma3").manifest
    retraced = msgspec.structs.replace(manifest, device="gpu")
    for machine in (MAC, LINUX):
        assert plan_of(manifest, task, machine=machine) == plan_of(retraced, task, machine=machine)


@pytest.mark.parametrize("machine", [LINUX, MAC, on(LINUX, blas=Blas(8, 1, 2), heap=Heap(1))])
def test_a_machine_is_read_as_it_was_written(tmp_path: Path, machine: Machine) -> None:
    path = tmp_path / "machine.json"
    path.write_text(report_of(msgspec.to_builtins(machine)))
    assert read_machine(path) == machine
    facts = msgspec.to_builtins(MAC)
    del facts["blas"], facts["heap"]
    path.write_text(report_of(facts))
    assert read_machine(path) == MAC


def report_of(facts: object) -> str:
    """As `ondevice bench machine` writes them, among the rest of its report."""
    return json.dumps({"benchmark": "machine", "measured_machine": facts, "rows": []})


FACTS = msgspec.to_builtins(LINUX)
ODD: dict[str, object] = {
    "text": "this one",
    "a list": [FACTS],
    "nothing": {},
    "another field": {**FACTS, "cores": 8},
    "no process": {name: fact for name, fact in FACTS.items() if name != "process_bytes"},
    "text for bytes": {**FACTS, "process_bytes": "30 MB"},
    "less than nothing": {**FACTS, "process_bytes": -1},
    "another device": {**FACTS, "device": "tpu"},
    "another arithmetic": {**FACTS, "arithmetic": "auto"},
    "another allocator": {**FACTS, "allocator": "jemalloc"},
    "no threads": {**FACTS, "blas": {"threads": 0}},
    "a heap of text": {**FACTS, "heap": {"share": "much"}},
    "another heap": {**FACTS, "heap": {"name": "jemalloc"}},
    "another BLAS": {**FACTS, "blas": {"name": "MKL"}},
}


TEXTS = ["", "{", "[]", "{}", "\0", "[" * 100_000, json.dumps(FACTS)]


@pytest.mark.parametrize("text", [*map(report_of, ODD.values()), *TEXTS], ids=[*ODD, *range(7)])
def test_what_is_no_machine_or_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"--machine .*machine\.json describes no machine: ") as no:
        read_machine(path)
    assert no.value.exit_code == 2


def test_a_machine_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(UsageError, match=f"--machine {path} cannot be read: "):
            read_machine(path)


def test_the_command_plans_for_the_machine_in_a_file(tiny: Tiny, tmp_path: Path) -> None:
    bundle, path = tiny("gemma3"), tmp_path / "machine.json"
    path.write_text(report_of(msgspec.to_builtins(MAC)))
    command = ["plan", bundle.path, "--max-seq-length=64", "--budget=300MB", "--batch-size=2"]
    expected = plan_of(bundle.manifest, TASKS["mebp"], 300_000_000, MAC)
    assert json_of(*command, f"--machine={path}") == json.loads(json.dumps(expected.to_json()))
    refuses(2, "typo cannot be read", *command, f"--machine={tmp_path / 'typo'}", by=ondevice)
    small = ondevice(*command, f"--machine={path}", "--budget=50MB")  # less than its process
    assert small.returncode == 3 and "the smallest that fits is" in small.stderr
