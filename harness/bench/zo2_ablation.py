"""ZO2's Table 3, ours: what each feature of block-wise MeZO buys, by taking it away.

Every variant is a process of `harness.bench.ablation`, in turn. What reading ahead buys depends on where
the file is, so it is measured with the file in the system's cache and with its pages dropped before
each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import NOT_PUBLISHED, Bench, Benchmark, Row, Variant, around, megabytes
from harness.bench.benchmark import seconds as shown_seconds
from harness.bench.benchmark import times as shown_times
from harness.bench.published import ABLATION, ZO2_TABLE3
from harness.measure.process import ondevice
from harness.measure.repeats import Outcome, Process, figures, in_turn, spread, time_ratio
from harness.report.report import Table

VARIANTS = {  # name: what is taken away, whether the file is cold, which variant it is compared to
    "full": ("nothing", False, "full"),
    "without prefetch": ("prefetch", False, "full"),
    "without the single read": ("single-read", False, "full"),
    "without the deferred update": ("deferred-update", False, "full"),
    "without buffer reuse": ("buffer-reuse", False, "full"),
    "full, cold file": ("nothing", True, "full, cold file"),
    "without prefetch, cold file": ("prefetch", True, "full, cold file"),
}
PUBLISHED = {  # of ZO2's columns
    "prefetch": "no_scheduler",
    "deferred-update": "no_efficient_update",
    "buffer-reuse": "no_reusable_memory",
}


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        found: list[dict[str, Any]] = []
        for budget in bench.budgets:
            bench.note(f"{model} at {length} tokens, budget {budget}")
            run = partial(_process, bench, bundle, length, Variant("mezo", "budget", budget))
            outcomes = in_turn(
                {
                    name: partial(run, without, cold)
                    for name, (without, cold, _) in VARIANTS.items()
                },
                bench.config.repeats,
                bench.note,
            )
            found += [_figures(name, budget, outcomes) for name in VARIANTS]
        return {"variants": found, "published": _published()}

    return bench.rows(measured)


def _process(
    bench: Bench, bundle: Path, length: int, variant: Variant, without: str, cold: bool
) -> Process:
    settings = {
        "without": without,
        "steps": bench.config.steps,
        "seed": bench.config.seed,
        "budget": bench.budget(bundle, length, variant),
        "max-seq-length": length,
        "scratch": bench.runs,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    if cold:
        flags.append("--cold")
    found: Process = json.loads(ondevice(str(bundle), *flags, module="harness.bench.ablation"))
    return found


def _figures(name: str, budget: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    without, cold, whole = VARIANTS[name]
    losses = [process["losses"] for one in outcomes.values() for process in one.processes]
    mine = [process["losses"] for process in outcomes[name].processes]
    return {
        "name": name,
        "without": without,
        "cold": cold,
        "budget": budget,
        **figures(outcomes[name]),
        "ratio": None if name == whole else time_ratio(outcomes[name], outcomes[whole]),
        "same_losses": all(one == losses[0] for one in mine) if mine else None,
        "published": PUBLISHED.get(without),
    }


def _published() -> dict[str, Any]:
    """How many times longer ZO2's step is without a feature: of each model, and over them."""
    columns = {
        column: {model: one.whole / float(getattr(one, column)) for model, one in ABLATION.items()}
        for column in PUBLISHED.values()
    }
    return {
        column: {"models": models, "over": spread(list(models.values()))}
        for column, models in columns.items()
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    lines = [
        ("model", "tokens", "budget", "variant", "s/step", "low-high", "to full", "low-high",
         "peak MB", "same losses", "paper: to full", "low-high"),
    ]  # fmt: skip
    for row in rows:
        place = (row["model"], str(row["tokens"]))
        for one in row.get("variants", ()):
            lines.append((*place, one["budget"], one["name"], *_cells(row, one)))
        if row["failed"]:
            lines.append((*place, "", row["failed"], *[""] * 8))
    return [Table("MeZO with one feature taken away", lines, 4)]


def _cells(row: Row, one: dict[str, Any]) -> tuple[str, ...]:
    papers = ("", "") if one["without"] == "nothing" else (NOT_PUBLISHED, "")
    if one["published"]:
        papers = around(row["published"][one["published"]]["over"], shown_times)
    if not one["processes"]:
        return ("did not run", *[""] * 5, *papers)
    ratio = ("", "") if one["without"] == "nothing" else around(one["ratio"], shown_times)
    return (
        *around(one["step_s"], shown_seconds),
        *ratio,
        megabytes(one["peak_footprint_bytes"]),
        "yes" if one["same_losses"] else "NO",
        *papers,
    )


ZO2_ABLATION = Benchmark(
    "ZO2's Table 3: what reading ahead, the single read, the deferred update and buffer reuse buy",
    ZO2_TABLE3,
    ("qwen2.5-0.5b",),
    (256,),
    _rows,
    _tables,
    (
        "to full: seconds per step over those of the full version, within a turn; low-high: of "
        "turns; ZO2's: over its seven models, from its tokens per second",
        "cold file: its pages are dropped from this system's cache before each step, and what is "
        "left is counted (cached_share in the JSON); a cache below this system is out of reach",
        "ZO2 moves full parameters between CPU and GPU; here LoRA adapters never leave memory, so "
        "there is no transfer that deferring the update could save",
    ),
)
