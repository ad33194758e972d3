"""`ondevice bench prediction`: the plan's peak against the measured one, over many combinations.

The error is (predicted - measured) / measured: above zero the plan asks for too much, below zero
for too little.
Invariant: every combination is in the JSON, with what was measured or why it was not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Row,
    failed_line,
    measured_variant,
    megabytes,
)
from harness.bench.published import MODELS
from harness.bench.targets import PREDICTED_UNDER, PREDICTED_WITHIN
from harness.measure.repeats import Outcome, most
from harness.report.table import Table
from runtime.config.methods import USUAL

OTHER_MODELS = ("gemma3-270m", "tiny-qwen2", "tiny-qwen3", "tiny-llama", "tiny-gemma3")
# no constant of the planner was fitted to these models, nor to any model at these lengths
UNSEEN_MODELS = ("llama-135m", "qwen3-0.6b")
UNSEEN_LENGTHS = (96, 160, 200, 384)
SHOWN = 5  # of the lowest errors, and of the highest
Found = dict[str, Any]


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        variants = bench.ours(*USUAL)
        outcomes = bench.in_turn(bundle, length, variants, lambda summary: {})
        return {
            "variants": [
                {**measured_variant(variant, outcome), "error": _error(outcome)}
                for variant, outcome in outcomes.items()
            ]
        }

    return bench.rows(measured)


def _error(outcome: Outcome) -> float | None:
    """The prediction's error as a share of the largest measured peak; None without a peak."""
    peak = most(outcome, "peak_footprint_bytes")
    if peak is None:
        return None
    return float(outcome.processes[0]["predicted_peak_bytes"] / peak - 1)


def distribution(errors: Sequence[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, the extremes, and how many are within the target."""
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
    """Whether an error is within the target."""
    return -PREDICTED_UNDER <= error <= PREDICTED_WITHIN


def _combinations(rows: Sequence[Row]) -> list[Found]:
    """Every variant of every row, with its place."""
    return [
        {"model": row["model"], "tokens": row["tokens"], **one}
        for row in rows
        for one in row.get("variants", ())
    ]


def _groups(found: Sequence[Found]) -> Iterator[tuple[str, list[Found]]]:
    """All combinations, then those that share a property; a property that all share is left out."""

    def shared(key: Callable[[Found], str]) -> Iterator[tuple[str, list[Found]]]:
        names = list(dict.fromkeys(map(key, found)))
        for name in names if len(names) > 1 else ():
            yield name, [one for one in found if key(one) == name]

    yield "all", list(found)
    yield from shared(_origin)
    yield from shared(lambda one: one["method"])
    yield from shared(lambda one: f"budget {one['budget']}")
    yield from shared(lambda one: f"{one['tokens']} tokens")
    yield from shared(lambda one: one["model"])


def _origin(one: Found) -> str:
    if one["model"] in UNSEEN_MODELS:
        return "unseen models and lengths"
    return "the papers' models" if one["model"] in MODELS else "other models"


def _tables(rows: Sequence[Row]) -> list[Table]:
    every = _combinations(rows)
    return [_errors(every), _extremes(rows, every)]


def _errors(found: Sequence[Found]) -> Table:
    """The distribution of the errors in every group."""
    lines: list[tuple[str, ...]] = [
        ("of", "combinations", "median %", "p5 %", "p95 %", "lowest %", "highest %",
         "within target", "all within"),
    ]  # fmt: skip
    known = [one for one in found if one["error"] is not None]
    for name, group in _groups(known) if known else ():
        spread = distribution([each["error"] for each in group])
        keys = ("median", "p5", "p95", "lowest", "highest")
        all_within = "yes" if spread["within"] == spread["count"] else "NO"
        counts = (f"{spread['count']:.0f}", f"{spread['within']:.0f}")
        errors = [_percent(spread[key]) for key in keys]
        lines.append((name, counts[0], *errors, counts[1], all_within))
    return Table("Error of the predicted peak, (predicted - measured) / measured", lines, 1)


def _extremes(rows: Sequence[Row], every: Sequence[Found]) -> Table:
    lines: list[tuple[str, ...]] = [
        ("model", "tokens", "method", "budget", "measured MB", "predicted MB", "error %"),
    ]
    known = [one for one in every if one["error"] is not None]
    rising = sorted(known, key=lambda one: float(one["error"]))
    for one in [*rising[:SHOWN], *rising[SHOWN:][-SHOWN:]]:
        process = one["processes"][0]
        lines.append(
            (
                *(one["model"], str(one["tokens"]), one["method"]),
                f"{one['budget']} ({process['budget_bytes'] / 1e6:.0f} MB)",
                megabytes(one["peak_footprint_bytes"]),
                megabytes(process["predicted_peak_bytes"]),
                _percent(one["error"]),
            )
        )
    lines += [line for row in rows for line in failed_line(row, lines[0])]
    return Table("The lowest and the highest errors", lines, 4)


def _percent(value: float) -> str:
    return f"{100 * value:+.1f}"


PREDICTION = Benchmark(
    "the predicted peak against the measured one: models, lengths, methods, budgets",
    None,
    (*MODELS, *OTHER_MODELS, *UNSEEN_MODELS),
    (64, 256, 1024),
    _rows,
    _tables,
    (
        f"target: within {100 * PREDICTED_WITHIN:.0f} % of the measured peak, and never under it "
        f"by more than {100 * PREDICTED_UNDER:.0f} %; two steps are enough to reach the peak "
        "(--steps 2 --repeats 1)",
        "measured: the footprint of the whole process, the largest of its repeats; most of it is "
        "the interpreter and libraries in the tiny models",
    ),
    budgets=("min", "2xmin", "1GB"),
    own_lengths=dict.fromkeys(UNSEEN_MODELS, UNSEEN_LENGTHS),
)
