"""`ondevice bench machine`: how this machine's heap behaves, and how fast it is.

Short trainings that go on beyond their budget show how much the heap holds beyond the memory in
use; a least-squares fit over them gives the values of `runtime.machine.machine.Heap`. The commands
`ondevice plan --machine` and `ondevice train --machine` read the JSON; everything also works
without it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Cells,
    Row,
    Variant,
    each_case,
    measured_variant,
    megabytes,
    variants_table,
)
from harness.measure.command import flag, ondevice
from harness.measure.repeats import Process, in_turn, most
from harness.report.table import Table
from runtime.bundle.store import open_bundle
from runtime.config.methods import USUAL
from runtime.core.units import format_number
from runtime.machine.glibc import LONG_VALUE_BYTES
from runtime.machine.machine import Heap, Machine
from runtime.plan.allocator import wider_bytes
from runtime.plan.lower import lower
from runtime.plan.plan import Plan

# targets of a predicted peak, as shares of the measured one: at most so much above it, and below it
PREDICTED_WITHIN, PREDICTED_UNDER = 0.05, 0.02
MODELS = ("gemma3-270m", "qwen2.5-0.5b")
LENGTHS = (64, 128, 256)
BUDGETS = ("min", "1.5xmin", "2.5xmin")
# the quantities that the heap's extra bytes are shares of; the first is 1
FEATURES = (
    "flat_bytes",
    "share",
    "share_of_backward",
    "share_of_logits",
    "share_of_kept",
)
KEPT = ("step_s", "peak_footprint_bytes", "peak_rss_bytes", "predicted_peak_bytes", "budget_bytes")


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    variants = bench.variants(*USUAL)
    runs = {variant.name: partial(_process, bench, bundle, length, variant) for variant in variants}
    speeds = json.loads(ondevice("probe", module="harness.bench.probe_process"))["speeds"]
    outcomes = in_turn(runs, bench.config.repeats, bench.note)
    return {
        "speeds": speeds,
        "variants": [
            measured_variant(variant, outcomes[variant.name])
            | {"extra_bytes": most(outcomes[variant.name], "extra_bytes")}
            for variant in variants
        ],
    }


def _process(bench: Bench, bundle: Path, length: int, variant: Variant) -> Process:
    """Train without ending at the budget, to measure also where memory is too small for it."""
    settings = {
        "method": variant.method,
        "steps": bench.config.steps,
        "seed": bench.config.seed,
        "budget": bench.budget(bundle, length, variant),
        "max_seq_length": length,
        "scratch": bench.runs,
    }
    flags = [flag(name, value) for name, value in settings.items()]
    measured = json.loads(ondevice(str(bundle), *flags, module="harness.bench.heap_process"))
    return {key: measured[key] for key in KEPT} | _extra(bundle, measured)


def _extra(bundle: Path, measured: Process) -> dict[str, Any]:
    """The bytes beyond the process and the memory in use, and the quantities to fit them by."""
    plan = msgspec.convert(measured["plan"], Plan)
    manifest = open_bundle(bundle).manifest
    packed = plan.arithmetic == "packed"
    lowered = lower(manifest, plan.bucket, plan.sizes, packed, compiled=plan.compiled)
    alive = plan.live_bytes + plan.adapter_bytes + plan.gradient_bytes
    on_heap = alive - lowered.execution.largest_tile_bytes()
    planned_for = msgspec.convert(measured["machine_value"], Machine)
    backward = plan.gradient_bytes > 0
    varied = backward and lowered.execution.tiled  # as `unused_bytes` counts it
    kept = measured["kept_in_use_bytes"]
    fixed = plan.process_bytes + alive + kept + plan.materialized_bytes
    wider = wider_bytes(manifest, plan.bucket, plan.value_bytes)
    fixed += int(planned_for.heap.share_of_wider * wider * (2 if backward else 1))
    return {
        "extra_bytes": measured["peak_footprint_bytes"] - fixed,
        "features": {
            "flat_bytes": 1.0,
            "share": float(max(0, on_heap)),
            "share_of_backward": float(max(0, on_heap)) if varied else 0.0,
            "share_of_logits": float(4 * plan.bucket * plan.chunk_rows) if varied else 0.0,
            "share_of_kept": float(kept),
        },
        "mapped": plan.mapped_value_bytes >= LONG_VALUE_BYTES,
        "machine": measured["machine_value"],
    }


def fit(rows: Sequence[Row]) -> Heap:
    """The heap values that best explain the measurements, none below zero.

    They minimize the squared distances of the relative errors from the middle of the target.
    """
    processes = [process for process in _processes(rows) if not process["mapped"]]
    names = [n for n in FEATURES if any(process["features"][n] for process in processes)]
    peaks = np.array([process["peak_footprint_bytes"] for process in processes], float)
    table = np.array([[process["features"][name] for name in names] for process in processes])
    extra = np.array([process["extra_bytes"] for process in processes], float)
    extra += (PREDICTED_WITHIN - PREDICTED_UNDER) / 2 * peaks
    scale = table.max(axis=0)
    values = np.zeros(len(names))
    free = list(range(len(names)))
    while free:
        part = (table / scale / peaks[:, None])[:, free]
        solved = np.linalg.lstsq(part, extra / peaks, rcond=None)[0]
        if (solved >= 0).all():
            values[free] = solved / scale[free]
            break
        free = [index for index, value in zip(free, solved, strict=True) if value >= 0]
    fitted = {name: round(float(value), 3) for name, value in zip(names, values, strict=True)}
    fitted |= {name: int(value) for name, value in fitted.items() if name.endswith("_bytes")}
    return msgspec.structs.replace(Heap(), **fitted)


def _processes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        process
        for row in rows
        for variant in row.get("variants", ())
        for process in variant["processes"]
    ]


def measured_machine(rows: Sequence[Row]) -> dict[str, Any]:
    """The entry `measured_machine` of the JSON: this machine, with the fitted heap values."""
    processes = [process for process in _processes(rows) if not process["mapped"]]
    if not processes:
        return {}
    machine = msgspec.convert(processes[-1]["machine"], Machine)
    if machine.allocator == "glibc":
        machine = msgspec.structs.replace(machine, heap=fit(rows))
    return {"measured_machine": msgspec.to_builtins(machine)}


def _cells(row: Row, variant: dict[str, Any]) -> Cells:
    sizes = (variant["peak_footprint_bytes"], variant["extra_bytes"])
    return (variant["method"], variant["budget"], *map(megabytes, sizes))


def _tables(rows: Sequence[Row]) -> list[Table]:
    facts = measured_machine(rows)
    shares: list[Cells] = [("the heap's constant", "measured", "default")]
    if facts:
        heap, default = facts["measured_machine"]["heap"], msgspec.to_builtins(Heap())
        shares += [(name, f"{heap[name]:g}", f"{default[name]:g}") for name in default]
    head = ("method", "budget", "peak MB", "beyond what is alive MB")
    speeds: list[Cells] = [("speed", "value")]
    measured = [row["speeds"] for row in rows if "speeds" in row]
    for name in measured[0] if measured else ():
        middle = statistics.median(row[name] for row in measured)
        speeds.append((name, format_number(middle)))
    return [
        Table("Constants for `--machine`", shares, 1),
        variants_table("What they were fitted to", head, rows, 4, _cells),
        Table("Speeds", speeds, 1),
    ]


MACHINE = Benchmark(
    "this machine for `--machine`: what its heap holds beyond what is alive, and its speeds",
    MODELS,
    LENGTHS,
    each_case(_row),
    _tables,
    (
        "share_beside_mapped and share_of_wider are not fitted: they apply to longer rows, and to "
        "models with wider values",
        "two steps reach the peak of all (--steps 2 --repeats 1)",
    ),
    budgets=BUDGETS,
    facts=measured_machine,
    unused=("peers", "python", "compute_dtype"),
)
