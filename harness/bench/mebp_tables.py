"""The MeBP paper's Tables 2 and 4: seconds and peak footprint of a step, ours and its."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from harness.measure.repeats import Outcome, peak_ratio, time_ratio
from harness.report.table import Table

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-1b", "gemma3-4b")
TRAINABLE = "trainable_parameters"
NOTES = (
    "peak: the footprint of the whole process, the largest of its repeats; kernel peak: VmHWM on "
    "Linux, which counts file pages too and so is an upper bound; low-high: the range of all timed "
    "steps, or of the ratios of all turns",
)


@dataclass(frozen=True)
class Step:
    """One gradient step: seconds, and the process's peak footprint in MB."""

    seconds: float
    peak_mb: float


PAPER: dict[str, Any] = {
    "paper": "Memory-Efficient Backpropagation for Fine-Tuning LLMs on Resource-Constrained Mobile "
    "Devices",
    "place": "Table 2",
    "device": "iPhone 15 Pro Max, 8 GB",
    "setting": "256 tokens, batch 1, LoRA rank 8 on all linear layers, mean of 10 runs, "
    "phys_footprint",
    "methods": ["mebp", "mezo"],
}
# the paper's own figures; megabytes are 10^6 bytes, as phys_footprint is printed
TRAINABLE_MILLIONS = {
    "qwen2.5-0.5b": 4.39,
    "qwen2.5-1.5b": 9.23,
    "qwen2.5-3b": 14.97,
    "gemma3-1b": 6.52,
    "gemma3-4b": 14.90,
}

STEPS: dict[tuple[str, int, str], Step] = {  # by model, tokens and method: Tables 2 and 4
    ("qwen2.5-0.5b", 256, "mezo"): Step(2.68, 318.93),
    ("qwen2.5-0.5b", 256, "mebp"): Step(3.85, 320.17),
    ("qwen2.5-1.5b", 256, "mezo"): Step(5.47, 451.57),
    ("qwen2.5-1.5b", 256, "mebp"): Step(9.09, 460.24),
    ("qwen2.5-3b", 256, "mezo"): Step(10.28, 554.10),
    ("qwen2.5-3b", 256, "mebp"): Step(17.96, 661.78),
    ("gemma3-1b", 256, "mezo"): Step(4.88, 563.64),
    ("gemma3-1b", 256, "mebp"): Step(9.48, 569.00),
    ("gemma3-4b", 256, "mezo"): Step(16.86, 961.54),
    ("gemma3-4b", 256, "mebp"): Step(28.58, 1029.49),
    ("qwen2.5-1.5b", 128, "mezo"): Step(4.81, 367.49),
    ("qwen2.5-1.5b", 128, "mebp"): Step(6.92, 405.14),
    ("qwen2.5-1.5b", 512, "mezo"): Step(9.61, 617.82),
    ("qwen2.5-1.5b", 512, "mebp"): Step(17.14, 624.62),
    ("qwen2.5-1.5b", 1024, "mezo"): Step(18.18, 986.00),
    ("qwen2.5-1.5b", 1024, "mebp"): Step(34.40, 994.09),
}


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    variants = bench.variants(*PAPER["methods"])
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
    """Each method over those after it, under each budget."""
    return [
        {
            "what": f"{over.method} / {under.method}, {over.label}",
            "methods": [over.method, under.method],
            "step_s": time_ratio(outcomes[over], outcomes[under]),
            "peak_footprint": peak_ratio(outcomes[over], outcomes[under]),
        }
        for over, under in combinations(outcomes, 2)
        if over.label == under.label
    ]


def _tables(rows: Sequence[Row]) -> list[Table]:
    steps = variants_table(
        "Seconds and peak footprint of a step",
        ("method", "budget", "s/step", "low-high", "peak MB", "kernel peak MB", "predicted MB",
         "paper: s", "MB"),
        rows,
        4,
        lambda row, variant: (variant["method"], _budget(variant), *_step_cells(variant)),
    )  # fmt: skip
    ratios = [
        ("model", "tokens", "ratio", "s/step", "low-high", "peak MB", "smaller peak",
         "paper: s", "MB"),
    ]  # fmt: skip
    for row in rows:
        for ratio in row.get("ratios", ()):
            cells = (*around(ratio["step_s"], times), times(ratio["peak_footprint"]))
            published = _published_ratio(row, *ratio["methods"])
            ratios.append((*place(row), ratio["what"], *cells, _smaller(ratio), *published))
    return [steps, Table("Ratios", ratios, 3)]


def _budget(variant: dict[str, Any]) -> str:
    if not variant["processes"] or variant["budget"] != "min":
        return str(variant["name"]).partition(", ")[2]
    return f"min ({variant['processes'][0]['budget_bytes'] / 1e6:.0f} MB)"


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
    if ratio["peak_footprint"] is None:
        return ""
    over, under = ratio["methods"]
    return str(under if ratio["peak_footprint"] >= 1 else over)


TABLE2 = Benchmark(
    "MeBP's Table 2: seconds and peak memory of a step, five models at 256 tokens",
    MODELS,
    (256,),
    each_case(_row),
    _tables,
    NOTES,
    paper=PAPER,
)
