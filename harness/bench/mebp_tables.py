"""The MeBP paper's Tables 2 and 4: seconds and peak footprint of a step, ours beside the paper's.

Each method runs under our plan and under the paper's plan (a whole layer dequantized at once, full
logits) on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
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
    times,
    variants_table,
)
from harness.bench.published import MEBP_TABLE2, MODELS, STEPS, TRAINABLE_MILLIONS
from harness.measure.repeats import Outcome, peak_ratio, time_ratio
from harness.report.table import Table

TRAINABLE = "trainable_parameters"
NOTES = (
    "peak: the footprint of the whole process, the largest of its repeats; kernel peak: VmHWM on "
    "Linux, which counts file pages too and so is an upper bound; low-high: the range of all timed "
    "steps, or of the ratios of all turns",
    "the paper's plan: a layer dequantized at once, all scores and logits; its budget is this "
    "machine's memory, as it has nothing to choose",
)


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    variants = bench.variants(*MEBP_TABLE2.methods)
    outcomes = bench.in_turn(bundle, length, variants, _trainable)
    trainable = [
        process[TRAINABLE] for outcome in outcomes.values() for process in outcome.processes
    ]
    return {
        TRAINABLE: trainable[0] if trainable else None,
        "variants": [
            {
                **measured_variant(variant, outcome),
                "published": _published(model, length, variant.method),
            }
            for variant, outcome in outcomes.items()
        ],
        "ratios": _ratios(outcomes),
        "published_trainable_millions": TRAINABLE_MILLIONS.get(model),
    }


def _trainable(summary: dict[str, Any]) -> dict[str, Any]:
    return {TRAINABLE: summary[TRAINABLE]}


def _published(model: str, length: int, method: str) -> dict[str, float] | None:
    step = STEPS.get((model, length, method))
    return None if step is None else asdict(step)


def _ratios(outcomes: dict[Variant, Outcome]) -> list[dict[str, Any]]:
    """Each method over those after it under each plan, and the paper's plan over each of ours."""

    def ratio(what: str, over: Variant, under: Variant, methods: Sequence[str]) -> dict[str, Any]:
        return {
            "what": what,
            "methods": list(methods),
            "step_s": time_ratio(outcomes[over], outcomes[under]),
            "peak_footprint": peak_ratio(outcomes[over], outcomes[under]),
        }

    ratios = []
    for a, b in combinations(outcomes, 2):
        if a.label == b.label:
            methods = (a.method, b.method)
            ratios.append(ratio(f"{a.method} / {b.method}, {a.label}", a, b, methods))
    for paper in outcomes:
        for ours in outcomes:
            if (paper.plan, ours.plan) == ("paper", "budget") and paper.method == ours.method:
                name = f"{paper.label} / {ours.label}, {ours.method}"
                ratios.append(ratio(name, paper, ours, ()))
    return ratios


def _tables(rows: Sequence[Row]) -> list[Table]:
    steps = variants_table(
        "Seconds and peak footprint of a step",
        ("method", "plan", "s/step", "low-high", "peak MB", "kernel peak MB", "predicted MB",
         "paper: s", "MB"),
        rows,
        4,
        lambda row, variant: (variant["method"], _plan(variant), *_step_cells(variant)),
    )  # fmt: skip
    ratios = [
        ("model", "tokens", "ratio", "s/step", "low-high", "peak MB", "smaller peak",
         "paper: s", "MB"),
    ]  # fmt: skip
    for row in rows:
        for ratio in row.get("ratios", ()):
            cells = (*around(ratio["step_s"], times), times(ratio["peak_footprint"]))
            published = _published_ratio(row, *ratio["methods"]) if ratio["methods"] else ("", "")
            ratios.append((*place(row), ratio["what"], *cells, _smaller(ratio), *published))
    return [steps, Table("Ratios", ratios, 3)]


def _plan(variant: dict[str, Any]) -> str:
    if variant["plan"] == "paper" or not variant["processes"] or variant["budget"] != "min":
        return Variant(
            variant["method"], variant["plan"], variant["budget"], variant["compute_dtype"]
        ).label
    return f"our plan, min ({variant['processes'][0]['budget_bytes'] / 1e6:.0f} MB)"


def _step_cells(variant: dict[str, Any]) -> Cells:
    published = variant["published"]
    papers = (
        (f"{published['seconds']:.2f}", f"{published['peak_mb']:.2f}")
        if published
        else (NOT_PUBLISHED, "")
    )
    if not variant["processes"]:
        return ("did not run", "", "", "", "", *papers)
    return (
        *around(variant["step_s"], seconds),
        megabytes(variant["peak_footprint_bytes"]),
        megabytes(variant["peak_rss_bytes"]),
        megabytes(variant["processes"][0]["predicted_peak_bytes"]),
        *papers,
    )


def _published_ratio(row: Row, *methods: str) -> tuple[str, str]:
    over, under = (_published(row["model"], row["tokens"], method) for method in methods)
    if over is None or under is None:
        return NOT_PUBLISHED, ""
    return times(over["seconds"] / under["seconds"]), times(over["peak_mb"] / under["peak_mb"])


def _smaller(ratio: dict[str, Any]) -> str:
    """The method with the smaller peak, of a ratio of two methods."""
    if not ratio["methods"] or ratio["peak_footprint"] is None:
        return ""
    over, under = ratio["methods"]
    return str(under if ratio["peak_footprint"] >= 1 else over)


TABLE2 = Benchmark(
    "MeBP's Table 2: seconds and peak memory of a step, five models at 256 tokens",
    MEBP_TABLE2,
    MODELS,
    (256,),
    each_case(_row),
    _tables,
    NOTES,
)
