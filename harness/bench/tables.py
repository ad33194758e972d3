"""The MeBP paper's Tables 2 and 4: seconds and peak footprint of a step, ours beside the paper's.

MeBP and MeZO, each under our plan and under the paper's plan (a whole layer unpacked at once, full
logits) on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Bench,
    Benchmark,
    Row,
    Variant,
    around,
    megabytes,
    seconds,
    times,
)
from harness.bench.published import MEBP_TABLE2, MEBP_TABLE4, MODELS, STEPS, TRAINABLE_MILLIONS
from harness.measure.repeats import Outcome, Process, figures, in_turn, peak_ratio, time_ratio
from harness.report.report import Table

METHODS = ("mezo", "mebp")
NOTES = (
    "peak: the footprint of the whole process, the largest of its repeats; kernel peak: VmHWM on "
    "Linux, with file pages, an upper bound; low-high: of all timed steps, and for ratios of turns",
    "the paper's plan: a layer unpacked at once, all scores and logits; run on this machine with "
    "its memory as the budget, as it has nothing to choose",
)


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        trainable: list[int] = []

        def run(variant: Variant) -> Process:
            process, summary = bench.train(bundle, length, variant)
            trainable.append(summary["trainable_parameters"])
            return process

        variants = {f"{one.method}, {one.label}": one for one in bench.variants(*METHODS)}
        bench.note(f"{model} at {length} tokens")
        outcomes = in_turn(
            {name: partial(run, variant) for name, variant in variants.items()},
            bench.config.repeats,
            bench.note,
        )
        return {
            "trainable_parameters": trainable[0] if trainable else None,
            "variants": [
                {
                    "name": name,
                    **asdict(variant),
                    **figures(outcomes[name]),
                    "published": _published(model, length, variant.method),
                }
                for name, variant in variants.items()
            ],
            "ratios": _ratios(bench, outcomes),
            "published_trainable_millions": TRAINABLE_MILLIONS.get(model),
        }

    return bench.rows(measured)


def _published(model: str, length: int, method: str) -> dict[str, float] | None:
    step = STEPS.get((model, length, method))
    return None if step is None else asdict(step)


def _ratios(bench: Bench, outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """MeBP over MeZO under each plan, and the paper's plan over each of ours."""

    def ratio(what: str, over: Outcome, under: Outcome) -> dict[str, Any]:
        return {
            "what": what,
            "step_s": time_ratio(over, under),
            "peak_footprint": peak_ratio(over, under),
        }

    found = []
    for one in bench.variants("mebp"):
        mebp, mezo = (outcomes[f"{method}, {one.label}"] for method in ("mebp", "mezo"))
        name = f"mebp / mezo, {one.label}"
        found.append(ratio(name, mebp, mezo) | {"methods": True})
    papers = [one for one in bench.variants(*METHODS) if one.plan == "paper"]
    for paper in papers:
        for ours in bench.variants(paper.method):
            if ours.plan != "paper":
                over, under = (outcomes[f"{one.method}, {one.label}"] for one in (paper, ours))
                name = f"{paper.label} / {ours.label}, {ours.method}"
                found.append(ratio(name, over, under) | {"methods": False})
    return found


def _tables(rows: Sequence[Row]) -> list[Table]:
    steps = [
        ("model", "tokens", "method", "plan", "s/step", "low-high", "peak MB", "kernel peak MB",
         "predicted MB", "paper: s", "MB"),
    ]  # fmt: skip
    ratios = [
        ("model", "tokens", "ratio", "s/step", "low-high", "peak MB", "mezo <= mebp",
         "paper: s", "MB"),
    ]  # fmt: skip
    for row in rows:
        place = (row["model"], str(row["tokens"]))
        for one in row.get("variants", ()):
            steps.append((*place, one["method"], _plan(one), *_step_cells(one)))
        for one in row.get("ratios", ()):
            cells = (*around(one["step_s"], times), times(one["peak_footprint"]))
            published = _published_ratio(row) if one["methods"] else ("", "")
            ratios.append((*place, one["what"], *cells, _at_most(one), *published))
        if row["failed"]:
            steps.append((*place, "", row["failed"], *[""] * 7))
    return [Table("Seconds and peak footprint of a step", steps, 4), Table("Ratios", ratios, 3)]


def _plan(variant: dict[str, Any]) -> str:
    if variant["plan"] == "paper" or not variant["processes"] or variant["budget"] != "min":
        return Variant(variant["method"], variant["plan"], variant["budget"]).label
    return f"our plan, min ({variant['processes'][0]['budget_bytes'] / 1e6:.0f} MB)"


def _step_cells(variant: dict[str, Any]) -> tuple[str, ...]:
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


def _published_ratio(row: Row) -> tuple[str, str]:
    mebp, mezo = (_published(row["model"], row["tokens"], name) for name in ("mebp", "mezo"))
    if mebp is None or mezo is None:
        return NOT_PUBLISHED, ""
    return times(mebp["seconds"] / mezo["seconds"]), times(mebp["peak_mb"] / mezo["peak_mb"])


def _at_most(ratio: dict[str, Any]) -> str:
    if not ratio["methods"] or ratio["peak_footprint"] is None:
        return ""
    return "yes" if ratio["peak_footprint"] >= 1 else "NO"


TABLE2 = Benchmark(
    "MeBP's Table 2: seconds and peak memory of a step, five models at 256 tokens",
    MEBP_TABLE2,
    MODELS,
    (256,),
    _rows,
    _tables,
    NOTES,
)
TABLE4 = Benchmark(
    "MeBP's Table 4: the same for Qwen2.5 1.5B at 128 to 1024 tokens",
    MEBP_TABLE4,
    ("qwen2.5-1.5b",),
    (128, 256, 512, 1024),
    _rows,
    _tables,
    NOTES,
)
