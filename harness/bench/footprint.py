"""`ondevice bench footprint`: the smallest footprint of each model and length, broken down.

Each method trains under its smallest budget in fresh processes. Invariant: the peak is the largest
of the processes, and the breakdown is of the process that had it. The breakdown has the bytes that
the plan counts for each owner, and a remainder: together they are the measured peak. The remainder
is below zero where the plan counts more than was in use at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
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
    measured_variant,
    megabytes,
    place,
    seconds,
    variants_table,
)
from harness.bench.published import MEBP_TABLE2, MESP, MESP_PEAK_MB, MODELS, STEPS
from harness.measure.repeats import Outcome, most
from harness.report.table import Table
from runtime.config.methods import USUAL

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
# the project's targets, by model, tokens and method
PEAK_MB: dict[tuple[str, int, str], float] = {
    ("qwen2.5-0.5b", 256, "mebp"): 128,
    ("qwen2.5-0.5b", 1024, "mebp"): 230,
    ("qwen2.5-0.5b", 4096, "mebp"): 500,
    ("qwen2.5-1.5b", 256, "mebp"): 210,
    ("qwen2.5-3b", 256, "mebp"): 300,
    ("gemma3-1b", 256, "mebp"): 220,
    ("gemma3-4b", 256, "mebp"): 420,
}
SHARE_NOT_ACCOUNTED = 0.05  # of the measured peak, at most, by a breakdown
OWNERS = {  # field of the plan: name in the table
    "process_bytes": "process",
    "adapter_bytes": "adapters",
    "gradient_bytes": "gradients",
    "live_bytes": "live values",
    "slack_bytes": "heap slack",
    "cache_bytes": "allocator cache",
    "kept_bytes": "kept values",
    "materialized_bytes": "dequantized weights",
}
OTHERS = "other planned"


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    outcomes = bench.in_turn(bundle, length, bench.ours(*USUAL), _plan)
    return {
        "variants": [
            {**_figures(variant, outcome), **_goals(variant, model, length, outcome)}
            for variant, outcome in outcomes.items()
        ]
    }


def _plan(summary: dict[str, Any]) -> dict[str, Any]:
    return {"plan": summary["plan"]}


def _figures(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    """Figures and breakdown; only the plan of the process with the largest peak is kept."""
    plans = [
        (process["peak_footprint_bytes"], process.pop("plan")) for process in outcome.processes
    ]
    peak, plan = max(plans, key=lambda measured: measured[0], default=(0, None))
    return {
        **measured_variant(variant, outcome),
        "plan": plan,
        "breakdown": None if plan is None else breakdown(plan, peak),
    }


def breakdown(plan: Mapping[str, Any], peak_bytes: int) -> dict[str, Any]:
    """The bytes of each owner, and the remainder with its share of the peak."""
    owners = {name: int(plan.get(key, 0)) for key, name in OWNERS.items()}
    owners[OTHERS] = plan["predicted_peak_bytes"] - sum(owners.values())
    remainder = peak_bytes - sum(owners.values())
    share = remainder / peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "owners_bytes": owners,
        "not_accounted_bytes": remainder,
        "not_accounted_share": share,
        "accounted": abs(share) <= SHARE_NOT_ACCOUNTED,
        "largest": largest(plan),
    }


def largest(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The block and direction in which the plan counts the most live bytes; the first of equals."""
    passes = [
        {"block": block["name"], "direction": direction, "bytes": block[f"{direction}_bytes"]}
        for block in plan["blocks"]
        for direction in ("forward", "backward")
    ]
    return max(passes, key=lambda live: live["bytes"])


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
        "method", "budget", "peak MB", "predicted MB", "kernel peak MB", "s/step", "low-high",
        "target MB", "reached", f"MeBP, {phone}: MB", "s", f"MeSP, {newer}: MB",
    )  # fmt: skip
    parts: list[Cells] = [
        ("model", "tokens", "method", "budget", "peak", *OWNERS.values(), OTHERS,
         "not accounted for", "its share", "sums within 5 %", "most alive in"),
    ]  # fmt: skip
    for row in rows:
        for variant in row.get("variants", ()):
            if variant["breakdown"]:
                start = (*place(row), variant["method"], variant["budget"])
                parts.append((*start, *_parts(variant["breakdown"])))
    tables = [variants_table("Peak footprint and seconds of a step", head, rows, 4, _cells)]
    if len(parts) > 1:
        tables.append(Table("What holds the peak, MB", parts, 4))
    return tables + _growth(rows)


def _cells(row: Row, variant: dict[str, Any]) -> Cells:
    target = variant["target_mb"]
    reached = {None: "", True: "yes", False: "NO"}[variant["reached"]]
    mebp, mesp = variant["published"]["mebp_table2"], variant["published"]["mesp"]
    no_mesp = NOT_PUBLISHED if variant["method"] in MESP.methods else ""
    goals = (
        *("" if target is None else f"{target:.0f}", reached),
        *((f"{mebp['peak_mb']:.2f}", f"{mebp['seconds']:.2f}") if mebp else (NOT_PUBLISHED, "")),
        f"{mesp['peak_mb']:.1f}" if mesp else no_mesp,
    )
    if not variant["processes"]:
        return (variant["method"], variant["budget"], "did not run", *[""] * 4, *goals)
    process = variant["processes"][0]
    return (
        variant["method"],
        f"{variant['budget']} ({process['budget_bytes'] / 1e6:.0f} MB)",
        megabytes(variant["peak_footprint_bytes"]),
        megabytes(process["predicted_peak_bytes"]),
        megabytes(variant["peak_rss_bytes"]),
        *around(variant["step_s"], seconds),
        *goals,
    )


def _parts(breakdown: dict[str, Any]) -> Cells:
    largest = breakdown["largest"]
    return (
        megabytes(breakdown["peak_bytes"]),
        *(megabytes(size) for size in breakdown["owners_bytes"].values()),
        megabytes(breakdown["not_accounted_bytes"]),
        f"{100 * breakdown['not_accounted_share']:+.1f} %",
        "yes" if breakdown["accounted"] else "NO",
        f"{largest['block']} {largest['direction']}, {megabytes(largest['bytes'])}",
    )


def _growth(rows: Sequence[Row]) -> list[Table]:
    """The growth of the peak per 1000 tokens, from each length of a model to the next."""
    lines: list[Cells] = [("model", "method", "budget", "from", "to", "MB per 1000")]
    peaks: dict[tuple[str, str, str], dict[int, int]] = {}
    for row in rows:
        for variant in row.get("variants", ()):
            if variant["processes"]:
                key = (row["model"], variant["method"], variant["budget"])
                peaks.setdefault(key, {})[row["tokens"]] = variant["peak_footprint_bytes"]
    for key, by_length in peaks.items():
        for (low, below), (high, above) in pairwise(sorted(by_length.items())):
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
    each_case(_row),
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
