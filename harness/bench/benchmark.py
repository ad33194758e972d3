"""The base of every benchmark: its measurements, its trainings, and the display of its rows.

A benchmark makes rows, one for each model and length, and tables of those rows. Invariant: tables
and pictures are drawn from the rows alone, which are the JSON that is written.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.config.bench import BenchConfig, parts, times_smallest
from harness.measure.bundles import bundle_of, smallest_megabytes
from harness.measure.repeats import Outcome, Process, figures, in_turn, reason
from harness.measure.training import measure_training
from harness.report.chart import Chart
from harness.report.table import Table
from runtime.core.errors import OnDeviceError
from runtime.core.notes import Note

Row = dict[str, Any]
Cells = tuple[str, ...]  # the cells of a table
NOT_PUBLISHED = "not in the paper"


@dataclass(frozen=True)
class Variant:
    """One way to train: a method under a budget."""

    method: str
    budget: str
    compute_dtype: str = "float32"

    @property
    def label(self) -> str:
        dtype = "" if self.compute_dtype == "float32" else f", {self.compute_dtype}"
        return f"{self.budget}{dtype}"

    @property
    def name(self) -> str:
        return f"{self.method}, {self.label}"


@dataclass(frozen=True)
class Bench:
    """The settings, the lengths to measure of each model, and a scratch folder for runs."""

    config: BenchConfig
    cases: Mapping[str, Sequence[int]]
    budgets: Sequence[str]
    runs: Path
    note: Note

    def rows(self, measured: Callable[[Bench, Path, str, int], Row]) -> Iterator[Row]:
        """A row for each model and length: that of `measured`, or the reason why there is none.

        `measured` is given the bundle, the model's name and the length.
        """
        private = {str(self.runs): "RUNS", str(Path(self.config.bundles).resolve()): "BUNDLES"}
        for model, lengths in self.cases.items():
            bundle, failed = None, None
            try:
                bundle = bundle_of(Path(self.config.bundles), model, lengths, self.note)
            except OnDeviceError as problem:
                failed = f"no bundle: {reason(problem)}"
                self.note(f"{model}: {failed}")
            for length in lengths:
                row: Row = {"model": model, "tokens": length, "failed": failed}
                if bundle is not None:
                    self.note(f"{model} at {length} tokens")
                    row |= measured(self, bundle, model, length)
                yield _without(private, row)

    def variants(self, *methods: str) -> list[Variant]:
        """Every method, budget by budget, in every type of products."""
        return [
            Variant(method, budget, dtype)
            for budget in self.budgets
            for method in methods
            for dtype in parts(self.config.compute_dtype)
        ]

    def budget(self, bundle: Path, length: int, variant: Variant) -> str:
        """The budget that a variant trains under, as a size."""
        times = times_smallest(variant.budget)
        if times is None:
            return variant.budget
        method, dtype = variant.method, variant.compute_dtype
        return f"{math.ceil(times * smallest_megabytes(bundle, method, length, dtype))}MB"

    def in_turn(
        self,
        bundle: Path,
        length: int,
        variants: Sequence[Variant],
        kept: Callable[[dict[str, Any]], Process] = lambda summary: {},
    ) -> dict[Variant, Outcome]:
        """Train every variant `--repeats` times; `kept` extracts from each summary."""

        def run(variant: Variant) -> Process:
            process, summary = self.train(bundle, length, variant)
            return process | kept(summary)

        runs = {variant.name: partial(run, variant) for variant in variants}
        outcomes = in_turn(runs, self.config.repeats, self.note)
        return {variant: outcomes[variant.name] for variant in variants}

    def train(
        self,
        bundle: Path,
        length: int,
        variant: Variant,
    ) -> tuple[Process, dict[str, Any]]:
        """Train for `--steps` in a fresh process: measurements, and the summary with its plan."""
        settings: dict[str, object] = {
            "bundle": str(bundle),
            "data": f"random:{self.config.seed}",
            "method": variant.method,
            "budget": self.budget(bundle, length, variant),
            "compute_dtype": variant.compute_dtype,
            "max_seq_length": length,
            "steps": self.config.steps,
            "save_every": 0,
        }
        with tempfile.TemporaryDirectory(dir=self.runs) as place:
            run = Path(place) / "run"
            summary = measure_training(settings, run)
            summary["plan"] = json.loads((run / "plan.json").read_text())
            lines = (run / "metrics.jsonl").read_text().splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines]
        keys = ("peak_footprint_bytes", "peak_rss_bytes", "predicted_peak_bytes", "budget_bytes")
        return {"step_s": seconds[1:], **{key: summary[key] for key in keys}}, summary


def _without(private: Mapping[str, str], value: Any) -> Any:
    """JSON in which the paths of this machine are replaced by words."""
    if isinstance(value, str):
        for path, word in private.items():
            value = value.replace(path, word)
    elif isinstance(value, dict):
        value = {key: _without(private, item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_without(private, item) for item in value]
    return value


def measured_variant(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    """A variant and its figures, as JSON."""
    return {"name": variant.name, **asdict(variant), **figures(outcome)}


def each_case(measured: Callable[[Bench, Path, str, int], Row]) -> Callable[[Bench], Iterator[Row]]:
    """The rows of a benchmark that measures each model and length by itself: see `Bench.rows`."""
    return lambda bench: bench.rows(measured)


@dataclass(frozen=True)
class Benchmark:
    """One entry of `ondevice bench`.

    `models`, `lengths` and `budgets` are measured where the command line names no others; options
    in `unused` are refused; `pictures` returns charts by file name suffix. `paper` says where
    published figures come from, and which of our methods they are compared with.
    """

    text: str
    models: Sequence[str]
    lengths: Sequence[int]
    rows: Callable[[Bench], Iterator[Row]]
    tables: Callable[[Sequence[Row]], list[Table]]
    notes: Sequence[str] = ()
    pictures: Callable[[Sequence[Row]], Mapping[str, Sequence[Chart]]] = lambda rows: {}
    facts: Callable[[Sequence[Row]], Mapping[str, Any]] = lambda rows: {}
    budgets: Sequence[str] = ("1GB",)
    paper: Mapping[str, Any] | None = None
    unused: Sequence[str] = ("peers", "python")


def place(row: Row) -> tuple[str, str]:
    """The first cells of a table line: model and tokens."""
    return row["model"], str(row["tokens"])


def failed_lines(rows: Sequence[Row], left: int) -> list[Cells]:
    """The lines of rows that failed, with the reason in the last of `left` columns of words."""
    return [(*place(row), *[""] * (left - 3), row["failed"]) for row in rows if row["failed"]]


def padded(title: str, lines: Sequence[Cells], left: int) -> Table:
    """A table whose short lines end with blank cells."""
    width = len(lines[0])
    return Table(title, [(*line, *[""] * (width - len(line))) for line in lines], left)


def variants_table(
    title: str,
    head: Cells,
    rows: Sequence[Row],
    left: int,
    cells: Callable[[Row, dict[str, Any]], Cells],
) -> Table:
    """A line for each variant of each row: model, tokens, and the variant's cells.

    The first `left` columns are words. A row that failed has its reason in the last of them.
    """
    lines: list[Cells] = [("model", "tokens", *head)]
    for row in rows:
        lines += [(*place(row), *cells(row, variant)) for variant in row.get("variants", ())]
        lines += failed_lines([row], left)
    return padded(title, lines, left)


def megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def seconds(value: float) -> str:
    """Seconds with three significant digits or two decimals: 12.34, 1.23, 0.123."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def around(spread: Mapping[str, float] | None, shown: Callable[[float], str]) -> tuple[str, str]:
    """A spread as two cells: the median, and the range."""
    if spread is None:
        return "-", "-"
    return shown(spread["median"]), f"{shown(spread['low'])}-{shown(spread['high'])}"


def times(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def failures(rows: Sequence[Row]) -> list[str]:
    """A note for each row and each variant that failed."""
    notes: list[str] = []
    for row in rows:
        where = f"{row['model']} at {row['tokens']} tokens"
        if row["failed"]:
            notes.append(f"{where}: {row['failed']}")
        for variant in row.get("variants", ()):
            if variant["failed"]:
                notes.append(f"{where}, {variant['name']}: {variant['failed']}")
    return notes


def remarks(rows: Sequence[Row]) -> list[str]:
    """The rows' own notes, each with its model and length."""
    return [
        f"{row['model']} at {row['tokens']} tokens: {note}"
        for row in rows
        for note in row.get("notes", ())
    ]
