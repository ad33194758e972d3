"""`ondevice bench prediction`: the plan's peak against the measured one, over many combinations.

The error is (predicted - measured) / measured: above zero the plan asks for too much, below zero it
promises too little. Invariant: every combination is a row of the JSON, with what was measured or
why it was not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Benchmark, Row, megabytes
from harness.bench.published import MODELS
from harness.bench.targets import PREDICTED_UNDER, PREDICTED_WITHIN
from harness.measure.repeats import Outcome, figures
from harness.report.report import Table

METHODS = ("mebp", "mezo")
OTHER_MODELS = ("gemma3-270m", "tiny-qwen2", "tiny-qwen3", "tiny-llama", "tiny-gemma3")
SHOWN = 5  # of the lowest errors, and of the highest
Found = dict[str, Any]


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        bench.note(f"{model} at {length} tokens")
        outcomes = bench.in_turn(bundle, length, bench.ours(*METHODS), lambda summary: {})
        return {
            "variants": [
                {
                    "name": variant.name,
                    **asdict(variant),
                    **figures(outcome),
                    "error": _error(outcome),
                }
                for variant, outcome in outcomes.items()
            ]
        }

    return bench.rows(measured)


def _error(outcome: Outcome) -> float | None:
    """Of the largest measured peak; None where none was measured."""
    peak = figures(outcome)["peak_footprint_bytes"]
    if peak is None:
        return None
    return float(outcome.processes[0]["predicted_peak_bytes"] / peak - 1)


def distribution(errors: Sequence[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, the extremes, and the share that is within the target."""
    if len(errors) > 1:
        low, *_, high = statistics.quantiles(errors, n=20, method="inclusive")
    else:
        low = high = errors[0]
    return {
        "count": len(errors),
        "median": statistics.median(errors),
        "p5": low,
        "p95": high,
        "lowest": min(errors),
        "highest": max(errors),
        "within": sum(is_within(error) for error in errors),
    }


def is_within(error: float) -> bool:
    """Whether an error is inside the target."""
    return -PREDICTED_UNDER <= error <= PREDICTED_WITHIN


def _measured(rows: Sequence[Row]) -> list[Found]:
    """Every combination that has an error, with its place."""
    return [
        {"model": row["model"], "tokens": row["tokens"], **one}
        for row in rows
        for one in row.get("variants", ())
        if one["error"] is not None
    ]


def _groups(found: Sequence[Found]) -> Iterator[tuple[str, list[Found]]]:
    """All combinations, then those that share something; a group of all comes once."""

    def shared(key: Callable[[Found], str]) -> Iterator[tuple[str, list[Found]]]:
        names = list(dict.fromkeys(map(key, found)))
        for name in names if len(names) > 1 else ():
            yield name, [one for one in found if key(one) == name]

    yield "all", list(found)
    yield from shared(lambda one: "the papers' shapes" if one["model"] in MODELS else "others")
    yield from shared(lambda one: one["method"])
    yield from shared(lambda one: f"budget {one['budget']}")
    yield from shared(lambda one: f"{one['tokens']} tokens")
    yield from shared(lambda one: one["model"])


def _tables(rows: Sequence[Row]) -> list[Table]:
    found = _measured(rows)
    spreads: list[tuple[str, ...]] = [
        ("of", "combinations", "median %", "p5 %", "p95 %", "lowest %", "highest %",
         "within target", "met"),
    ]  # fmt: skip
    for name, group in _groups(found) if found else ():
        spread = distribution([each["error"] for each in group])
        keys = ("median", "p5", "p95", "lowest", "highest")
        met = "yes" if spread["within"] == spread["count"] else "NO"
        counts = (f"{spread['count']:.0f}", f"{spread['within']:.0f}")
        spreads.append((name, counts[0], *(_percent(spread[key]) for key in keys), counts[1], met))
    worst: list[tuple[str, ...]] = [
        ("model", "tokens", "method", "budget", "measured MB", "predicted MB", "error %"),
    ]
    rising = sorted(found, key=lambda one: float(one["error"]))
    for one in [*rising[:SHOWN], *rising[SHOWN:][-SHOWN:]]:
        process = one["processes"][0]
        worst.append(
            (
                *(one["model"], str(one["tokens"]), one["method"]),
                f"{one['budget']} ({process['budget_bytes'] / 1e6:.0f} MB)",
                megabytes(one["peak_footprint_bytes"]),
                megabytes(process["predicted_peak_bytes"]),
                _percent(one["error"]),
            )
        )
    worst += [
        (row["model"], str(row["tokens"]), "", row["failed"], *[""] * 3)
        for row in rows
        if row["failed"]
    ]
    return [
        Table("Error of the predicted peak, (predicted - measured) / measured", spreads, 1),
        Table("The lowest and the highest errors", worst, 4),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:+.1f}"


PREDICTION = Benchmark(
    "the peak that is predicted against the measured one: models, lengths, methods, budgets",
    None,
    (*MODELS, *OTHER_MODELS),
    (64, 256, 1024),
    _rows,
    _tables,
    (
        f"target: within {100 * PREDICTED_WITHIN:.0f} % of the measured peak, and never under it "
        f"by more than {100 * PREDICTED_UNDER:.0f} %; two steps reach the peak of all (--steps 2 "
        "--repeats 1)",
        "measured: the footprint of the whole process, the largest of its repeats; the tiny shapes "
        "are almost all interpreter and libraries",
    ),
    budgets=("min", "2xmin", "1GB"),
)
