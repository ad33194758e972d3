"""`ondevice bench curve`: the time of a step against the budget, from the smallest to 4 GB.

Every budget runs in a fresh process. Invariant: a rise is reported only where every timed step
of a larger budget took longer than every one of a smaller budget with another plan. Two budgets
with the same plan show how much of a difference is noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Cells,
    Row,
    Variant,
    around,
    each_case,
    measured_variant,
    megabytes,
    seconds,
    times,
    variants_table,
)
from harness.config.bench import parts
from harness.measure.bundles import smallest_megabytes
from harness.report.chart import Chart, Line
from harness.report.table import Table
from runtime.config.methods import USUAL

POINTS = 8
MOST_MB = 4000


def spaced_budgets(
    smallest_mb: int, most_mb: int = MOST_MB, points: int = POINTS
) -> tuple[str, ...]:
    """Budgets from the smallest to the most, each the same factor above the one before it."""
    if smallest_mb >= most_mb:
        return (f"{smallest_mb}MB",)
    factor = (most_mb / smallest_mb) ** (1 / (points - 1))
    rising = [smallest_mb, *(round(smallest_mb * factor**i) for i in range(1, points - 1)), most_mb]
    return tuple(f"{size}MB" for size in dict.fromkeys(rising))


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    variants = [
        Variant(method, budget, dtype)
        for method in USUAL
        for dtype in parts(bench.config.compute_dtype)
        for budget in bench.budgets
        or spaced_budgets(smallest_megabytes(bundle, method, length, dtype))
    ]
    outcomes = bench.in_turn(bundle, length, variants, _choices)
    measured = [measured_variant(variant, outcome) for variant, outcome in outcomes.items()]
    compared = {name: compare(variants) for name, variants in _by_series(measured).items()}
    notes = [note for name, result in compared.items() for note in _notes(name, result)]
    notes += between_dtypes(measured)
    return {"variants": measured, "compared": compared, "notes": notes}


def _choices(summary: dict[str, Any]) -> dict[str, Any]:
    """The plan's choices, without the bytes that follow from them."""
    plan = summary["plan"]
    return {
        "choices": {
            key: value
            for key, value in plan.items()
            if key != "blocks" and not key.endswith("_bytes")
        }
    }


def _by_series(measured: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The variants that ran, by method and type of products."""
    series: dict[str, list[dict[str, Any]]] = {}
    for variant in measured:
        if variant["processes"]:
            method, dtype = variant["method"], variant["compute_dtype"]
            name = method if dtype == "float32" else f"{method} in {dtype}"
            series.setdefault(name, []).append(variant)
    return series


def between_dtypes(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each budget the time of a step in float32 over that in another type."""
    ran = [variant for variant in measured if variant["processes"]]
    for plain, other in combinations(ran, 2):
        if all(plain[key] == other[key] for key in ("method", "budget")):
            first, second = plain["step_s"], other["step_s"]
            ratio = times(first["median"] / second["median"])
            least, most = first["low"] / second["high"], first["high"] / second["low"]
            yield (
                f"{plain['method']} at {plain['budget']}: a step in {plain['compute_dtype']} takes "
                f"{ratio} ({least:.2f} to {most:.2f}) of one in {other['compute_dtype']}"
            )


def _budget(variant: Mapping[str, Any]) -> int:
    return int(variant["processes"][0]["budget_bytes"])


def compare(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method's budgets: the gain of the largest, every rise, and the noise of equal plans."""
    rising = sorted(measured, key=_budget)
    rises, noise = [], []
    for less, more in combinations(rising, 2):
        ratio = more["step_s"]["median"] / less["step_s"]["median"]
        if _plan(less) == _plan(more):
            noise.append(max(ratio, 1 / ratio))
        elif more["step_s"]["low"] > less["step_s"]["high"]:
            rises.append({"from_bytes": _budget(less), "to_bytes": _budget(more), "ratio": ratio})
    return {
        "budgets": len(rising),
        "first_over_last": (
            rising[0]["step_s"]["median"] / rising[-1]["step_s"]["median"] if rising else None
        ),
        "rises": rises,
        "noise": max(noise, default=None),
    }


def _plan(variant: Mapping[str, Any]) -> Any:
    return variant["processes"][0]["choices"]


def _notes(method: str, comparison: Mapping[str, Any]) -> Iterator[str]:
    if comparison["budgets"] < 2:
        return
    yield (
        f"{method}: a step of the smallest of {comparison['budgets']} budgets takes "
        f"{times(comparison['first_over_last'])} of one of the largest"
    )
    if not comparison["rises"]:
        yield f"{method}: time never rises beyond the spread"
    for rise in comparison["rises"]:
        yield (
            f"{method}: TIME RISES beyond the spread from {rise['from_bytes'] / 1e6:.0f} MB to "
            f"{rise['to_bytes'] / 1e6:.0f} MB, {times(rise['ratio'])}"
        )
    if comparison["noise"] is not None:
        yield f"{method}: the same plan twice differs by up to {times(comparison['noise'])}: noise"


def _tables(rows: Sequence[Row]) -> list[Table]:
    head = (
        "method", "budget", "products", "s/step", "low-high", "peak MB", "predicted MB", "error",
        "plan",
    )  # fmt: skip
    return [variants_table("Seconds of a step against the budget", head, rows, 5, _cells)]


def _differing(variants: Sequence[Mapping[str, Any]]) -> set[str]:
    """The choices that differ between the budgets of a method."""
    differing: set[str] = set()
    for of_series in _by_series([*map(dict, variants)]).values():
        plans = [_plan(variant) for variant in of_series]
        differing |= {key for plan in plans for key in plan if plan[key] != plans[0].get(key)}
    return differing


def _cells(row: Row, variant: Mapping[str, Any]) -> Cells:
    head = (variant["method"], variant["budget"], variant["compute_dtype"])
    if not variant["processes"]:
        return (*head, "did not run")
    shown = _differing(row["variants"])
    choices = {key: value for key, value in _plan(variant).items() if key in shown}
    return (
        *head,
        *around(variant["step_s"], seconds),
        megabytes(variant["peak_footprint_bytes"]),
        megabytes(predicted := variant["processes"][0]["predicted_peak_bytes"]),
        f"{100 * (predicted / variant['peak_footprint_bytes'] - 1):+.1f} %",
        ", ".join(f"{key} {value}" for key, value in choices.items()),
    )


def _pictures(rows: Sequence[Row]) -> Mapping[str, list[Chart]]:
    """Seconds of a step against the budget, a picture for each row."""
    drawn = {}
    for row in rows:
        measured = _by_series(row.get("variants", ()))
        if measured:
            drawn[f"{row['model']}-{row['tokens']}"] = [_chart(measured)]
    return drawn


def _chart(measured: Mapping[str, Sequence[dict[str, Any]]]) -> Chart:
    """Medians of each method, with bars from the least to the most."""
    lines = []
    for index, (name, variants) in enumerate(measured.items()):
        rising = sorted(variants, key=_budget)
        times = [variant["step_s"] for variant in rising]
        points = [(_budget(variant) / 1e6, variant["step_s"]["median"]) for variant in rising]
        ranges = [(time["low"], time["high"]) for time in times]
        lines.append(Line(name, index, points, marked=True, ranges=ranges))
    return Chart(
        "Time per step against the budget",
        "s",
        lines,
        from_zero=True,
        across="budget (MB)",
        logarithmic=True,
    )


CURVE = Benchmark(
    "seconds of a step against the budget, from the smallest that fits to 4 GB",
    ("qwen2.5-0.5b",),
    (256,),
    each_case(_row),
    _tables,
    (
        "low-high: the range of all timed steps; time rises beyond the spread where every step of "
        "a larger budget took longer than every step of a smaller one, and their plans differ",
        "error: (predicted - measured) / measured peak",
        f"budgets: {POINTS}, each the same factor above the one before it, or those of --budget",
    ),
    _pictures,
    budgets=(),
    unused=("peers", "python"),
)
