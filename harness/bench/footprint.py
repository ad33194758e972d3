"""`ondevice bench footprint`: the smallest footprint of each model and length, broken down.

Each method trains under its smallest budget in fresh processes. Invariant: the peak is the largest
of the processes, and the breakdown is of the process that had it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Bench,
    Benchmark,
    Row,
    Variant,
    around,
    failed_line,
    measured_variant,
    megabytes,
    place,
    seconds,
)
from harness.bench.breakdown import OTHERS, OWNERS, breakdown
from harness.bench.published import MEBP_TABLE2, MESP, MESP_PEAK_MB, MODELS, STEPS
from harness.bench.targets import PEAK_MB
from harness.measure.repeats import Outcome, most
from harness.report.table import Table
from runtime.config.methods import USUAL

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        outcomes = bench.in_turn(bundle, length, bench.ours(*USUAL), _plan)
        return {
            "variants": [
                {
                    **_found(variant, outcome),
                    **_goals(variant, model, length, outcome),
                }
                for variant, outcome in outcomes.items()
            ]
        }

    return bench.rows(measured)


def _plan(summary: dict[str, Any]) -> dict[str, Any]:
    return {"plan": summary["plan"]}


def _found(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    """Figures and breakdown; only the plan of the process with the largest peak is kept."""
    plans = [
        (process["peak_footprint_bytes"], process.pop("plan")) for process in outcome.processes
    ]
    peak, plan = max(plans, key=lambda one: one[0], default=(0, None))
    return {
        **measured_variant(variant, outcome),
        "plan": plan,
        "breakdown": None if plan is None else breakdown(plan, peak),
    }


def _goals(variant: Variant, model: str, length: int, outcome: Outcome) -> dict[str, Any]:
    """The target, whether it is reached, and the papers' figures for the same combination."""
    target = PEAK_MB.get((model, length, variant.method))
    peak = most(outcome, "peak_footprint_bytes")
    step = STEPS.get((model, length, variant.method))
    mesp = MESP_PEAK_MB.get((model, length)) if variant.method in MESP.methods else None
    return {
        "target_mb": target,
        "reached": None if target is None or peak is None else peak <= target * 1e6,
        "published": {
            "mebp_table2": None if step is None else {**asdict(step), "device": MEBP_TABLE2.device},
            "mesp": None if mesp is None else {"peak_mb": mesp, "device": MESP.device},
        },
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    phone, newer = (source.device.partition(",")[0] for source in (MEBP_TABLE2, MESP))
    head = (
        "model", "tokens", "method", "budget", "peak MB", "predicted MB", "kernel peak MB",
        "s/step", "low-high", "target MB", "reached", f"MeBP, {phone}: MB", "s",
        f"MeSP, {newer}: MB",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    parts: list[tuple[str, ...]] = [
        ("model", "tokens", "method", "budget", "peak", *OWNERS.values(), OTHERS,
         "not accounted for", "its share", "sums within 5 %", "most alive in"),
    ]  # fmt: skip
    for row in rows:
        for one in row.get("variants", ()):
            lines.append((*place(row), one["method"], *_cells(one)))
            if one["breakdown"]:
                parts.append((*place(row), one["method"], one["budget"], *_parts(one["breakdown"])))
        lines += failed_line(row, head)
    found = [Table("Peak footprint and seconds of a step", lines, 4)]
    if len(parts) > 1:
        found.append(Table("What holds the peak, MB", parts, 4))
    return found + _growth(rows)


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    target, reached = one["target_mb"], {None: "", True: "yes", False: "NO"}[one["reached"]]
    mebp, mesp = one["published"]["mebp_table2"], one["published"]["mesp"]
    no_mesp = NOT_PUBLISHED if one["method"] in MESP.methods else ""
    goals = (
        *("" if target is None else f"{target:.0f}", reached),
        *((f"{mebp['peak_mb']:.2f}", f"{mebp['seconds']:.2f}") if mebp else (NOT_PUBLISHED, "")),
        f"{mesp['peak_mb']:.1f}" if mesp else no_mesp,
    )
    if not one["processes"]:
        return (one["budget"], "did not run", *[""] * 4, *goals)
    process = one["processes"][0]
    return (
        f"{one['budget']} ({process['budget_bytes'] / 1e6:.0f} MB)",
        megabytes(one["peak_footprint_bytes"]),
        megabytes(process["predicted_peak_bytes"]),
        megabytes(one["peak_rss_bytes"]),
        *around(one["step_s"], seconds),
        *goals,
    )


def _parts(found: dict[str, Any]) -> tuple[str, ...]:
    largest = found["largest"]
    return (
        megabytes(found["peak_bytes"]),
        *(megabytes(size) for size in found["owners_bytes"].values()),
        megabytes(found["not_accounted_bytes"]),
        f"{100 * found['not_accounted_share']:+.1f} %",
        "yes" if found["accounted"] else "NO",
        f"{largest['block']} {largest['direction']}, {megabytes(largest['bytes'])}",
    )


def _growth(rows: Sequence[Row]) -> list[Table]:
    """The growth of the peak per 1000 tokens, from each length of a model to the next."""
    lines: list[tuple[str, ...]] = [("model", "method", "budget", "from", "to", "MB per 1000")]
    peaks: dict[tuple[str, str, str], dict[int, int]] = {}
    for row in rows:
        for one in row.get("variants", ()):
            if one["processes"]:
                known = peaks.setdefault((row["model"], one["method"], one["budget"]), {})
                known[row["tokens"]] = one["peak_footprint_bytes"]
    for key, known in peaks.items():
        for (low, below), (high, above) in pairwise(sorted(known.items())):
            slope = (above - below) / (high - low)
            lines.append((*key, str(low), str(high), megabytes(1000 * slope)))
    return [Table("Growth of the peak with the length", lines, 3)] if len(lines) > 1 else []


def _where(name: str, source: Any) -> str:
    return f"{name}: {source.paper}, {source.place}, {source.device}; {source.setting}"


FOOTPRINT = Benchmark(
    "the smallest peak footprint of five models, and of 0.5B by length, with what holds it",
    None,
    MODELS,
    (256,),
    _rows,
    _tables,
    (
        "peak: the footprint of the whole process, the largest of its repeats; kernel peak: VmHWM "
        "on Linux, which counts file pages too and so is an upper bound; low-high: the range of "
        "all timed steps",
        "what holds the peak: the plan's own figures; not accounted for: the measured peak minus "
        "their sum, below zero where the plan counts more than was in use at once; most alive in: "
        "the block and direction with the largest live values",
        _where("MeBP", MEBP_TABLE2),
        _where("MeSP", MESP),
    ),
    budgets=("min",),
    own_lengths={"qwen2.5-0.5b": LENGTHS},
)
