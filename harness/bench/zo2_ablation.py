"""Ablations like ZO2's Table 3: how much slower block-wise MeZO is without each feature.

`zo2-ablation` trains adapters, `zo2-full` all parameters, as ZO2 does, and compares with MeZO whose
weights are all in memory.

Every variant is a process of `harness.bench.steps_process`; their order alternates. The gain
from reading ahead depends on where the weights file is, so it is measured with the file in the
system's cache, and with its pages dropped before each step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Bench,
    Benchmark,
    Cells,
    Row,
    Variant,
    around,
    each_case,
    megabytes,
    seconds,
    times,
    variants_table,
)
from harness.bench.published import ABLATION, ZO2_TABLE3
from harness.measure.command import flag, ondevice
from harness.measure.repeats import (
    Outcome,
    Process,
    figures,
    in_turn,
    peak_ratio,
    spread,
    time_ratio,
)
from harness.report.table import Table

STEPS_PROCESS = "harness.bench.steps_process"
VARIANTS = {  # name: the feature that is off, whether the file is cold, the variant to compare to
    "full": ("nothing", False, "full"),
    "without prefetch": ("prefetch", False, "full"),
    "without the single read": ("single-read", False, "full"),
    "without the deferred update": ("deferred-update", False, "full"),
    "without buffer reuse": ("buffer-reuse", False, "full"),
    "full, cold file": ("nothing", True, "full, cold file"),
    "without prefetch, cold file": ("prefetch", True, "full, cold file"),
}
FULL_VARIANTS = {**VARIANTS, "all in memory": ("disk", False, "full")}
PUBLISHED = {  # feature: field of `published.Throughput`
    "prefetch": "no_scheduler",
    "deferred-update": "no_efficient_update",
    "buffer-reuse": "no_reusable_memory",
}


Variants = Mapping[str, tuple[str, bool, str]]


def _row(variants: Variants, bench: Bench, bundle: Path, model: str, length: int) -> Row:
    (method,) = ZO2_TABLE3.methods
    measured: list[dict[str, Any]] = []
    for budget in bench.budgets:
        run = partial(_process, bench, bundle, length, Variant(method, "budget", budget))
        runs = {name: partial(run, without, cold) for name, (without, cold, _) in variants.items()}
        outcomes = in_turn(runs, bench.config.repeats, bench.note)
        measured += [_figures(name, variants[name], budget, outcomes) for name in variants]
    return {"variants": measured, "published": _published()}


def _process(
    bench: Bench, bundle: Path, length: int, variant: Variant, without: str, cold: bool
) -> Process:
    process = measure_ablation(bench, bundle, length, variant, without, cold)
    return {key: process[key] for key in process.keys() - {"plan", "machine_value"}}


def measure_ablation(
    bench: Bench, bundle: Path, length: int, variant: Variant, without: str, cold: bool
) -> Process:
    """Measurements of a process of `harness.bench.steps_process`, its plan and its machine."""
    settings = {
        "method": variant.method,
        "without": without,
        "steps": bench.config.steps,
        "seed": bench.config.seed,
        "budget": bench.budget(bundle, length, variant),
        "max_seq_length": length,
        "scratch": bench.runs,
    }
    flags = [flag(name, value) for name, value in settings.items()] + ["--cold"] * cold
    process: Process = json.loads(ondevice(str(bundle), *flags, module=STEPS_PROCESS))
    return process


def _figures(
    name: str, variant: tuple[str, bool, str], budget: str, outcomes: dict[str, Outcome]
) -> dict[str, Any]:
    without, cold, whole = variant
    losses = [process["losses"] for outcome in outcomes.values() for process in outcome.processes]
    mine = [process["losses"] for process in outcomes[name].processes]
    return {
        "name": name,
        "without": without,
        "cold": cold,
        "budget": budget,
        **figures(outcomes[name]),
        "ratio": None if name == whole else time_ratio(outcomes[name], outcomes[whole]),
        "memory": None if name == whole else peak_ratio(outcomes[name], outcomes[whole]),
        "same_losses": all(run == losses[0] for run in mine) if mine else None,
        "largest_difference": max(
            (abs(a - b) for run in mine for a, b in zip(run, losses[0], strict=True)), default=None
        ),
        "published": PUBLISHED.get(without),
    }


def _published() -> dict[str, Any]:
    """How many times longer ZO2's step is without a feature: for each model, and over all."""
    columns = {
        column: {
            model: speeds.whole / float(getattr(speeds, column))
            for model, speeds in ABLATION.items()
        }
        for column in PUBLISHED.values()
    }
    return {
        column: {"models": models, "over": spread(list(models.values()))}
        for column, models in columns.items()
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    head = (
        "budget", "variant", "s/step", "low-high", "to full", "low-high", "peak MB", "to full",
        "same losses", "paper: to full", "low-high",
    )  # fmt: skip
    return [variants_table("MeZO without one feature", head, rows, 4, _cells)]


def _cells(row: Row, variant: dict[str, Any]) -> Cells:
    head = (variant["budget"], variant["name"])
    papers = ("", "") if variant["without"] == "nothing" else (NOT_PUBLISHED, "")
    if variant["published"]:
        papers = around(row["published"][variant["published"]]["over"], times)
    if not variant["processes"]:
        return (*head, "did not run", *[""] * 6, *papers)
    ratio = ("", "") if variant["without"] == "nothing" else around(variant["ratio"], times)
    return (
        *head,
        *around(variant["step_s"], seconds),
        *ratio,
        megabytes(variant["peak_footprint_bytes"]),
        "" if variant["memory"] is None else times(variant["memory"]),
        _sameness(variant),
        *papers,
    )


def _sameness(variant: dict[str, Any]) -> str:
    """Whether the losses are those of the full version; all in memory they are rounded apart."""
    if variant["same_losses"]:
        return "yes"
    if variant["without"] == "disk":
        return f"within {variant['largest_difference']:.0e}"
    return "NO"


_NOTES = (
    "to full: seconds per step, and the footprint, divided by those of the full version in the "
    "same turn; low-high: the range of the turns; ZO2's: of its seven models, from its tokens per "
    "second",
    "cold file: the file's pages are dropped from this system's cache before each step, and "
    "those that stay are counted (cached_share in the JSON); a hypervisor's cache is out of "
    "reach",
)
ZO2_ABLATION = Benchmark(
    "ZO2's Table 3: MeZO without prefetch, single read, deferred update, or buffer reuse",
    ZO2_TABLE3,
    ("qwen2.5-0.5b",),
    (256,),
    each_case(partial(_row, VARIANTS)),
    _tables,
    (
        *_NOTES,
        "ZO2 moves full parameters between CPU and GPU; here LoRA adapters never leave memory, so "
        "deferring the update saves no transfer",
    ),
)
ZO2_FULL = Benchmark(
    "ZO2's Tables 1 and 3 for all parameters: without each feature, and with all in memory",
    ZO2_TABLE3,
    ("qwen2.5-0.5b",),
    (256,),
    each_case(partial(_row, FULL_VARIANTS), {"trainable": "full"}),
    _tables,
    (
        *_NOTES,
        "all in memory: MeZO's Algorithm 1 in float32, with the same kernels and noise; it draws "
        "the noise of all parameters four times a step, the block-wise method twice. ZO2 is at "
        "0.97 to 0.99 of MeZO's throughput where the model fits on the GPU",
        "ZO2 moves parameters between CPU and GPU, here between disk and memory; the file is in "
        "the system's cache unless it says cold",
    ),
)
