"""What a benchmark is, and what it is given to measure with.

A benchmark makes rows, one for each model and length, and tables of those rows. Invariant: tables
and pictures are drawn from the rows alone, which are the JSON that is written.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.published import Source
from harness.measure.process import measure
from harness.measure.repeats import Note, Outcome, Process, in_turn, reason
from harness.measure.shapes import bundle_of, smallest_megabytes
from harness.report.report import Table
from ondevice.config.bench import BenchConfig, times_smallest
from ondevice.errors import OnDeviceError

Row = dict[str, Any]
NOT_PUBLISHED = "not in the paper"


@dataclass(frozen=True)
class Variant:
    """One way to train: a method under a plan; `budget` is empty where the plan is the paper's."""

    method: str
    plan: str
    budget: str

    @property
    def label(self) -> str:
        return "paper's plan" if self.plan == "paper" else f"our plan, {self.budget}"

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

    def rows(self, measured: Callable[[Path, str, int], Row]) -> Iterator[Row]:
        """A row of every model and length: what `measured` finds, or why there is nothing."""
        for model, lengths in self.cases.items():
            bundle, failed = None, None
            try:
                bundle = bundle_of(Path(self.config.bundles), model, lengths, self.note)
            except OnDeviceError as problem:
                failed = f"no bundle: {reason(problem)}"
                self.note(f"{model}: {failed}")
            for length in lengths:
                row: Row = {"model": model, "tokens": length, "failed": failed}
                yield row if bundle is None else row | measured(bundle, model, length)

    def variants(self, *methods: str) -> list[Variant]:
        """The methods under every plan that was asked for; methods change fastest."""
        paper = [Variant(method, "paper", "") for method in methods]
        plans = {"budget": self.ours(*methods), "paper": paper}
        return [one for plan in self.config.plan_names for one in plans[plan]]

    def ours(self, *methods: str) -> list[Variant]:
        """The methods under our plan with every budget; methods change fastest."""
        return [Variant(method, "budget", one) for one in self.budgets for method in methods]

    def budget(self, bundle: Path, length: int, variant: Variant) -> str:
        """The size that a variant trains under.

        The paper's plan has nothing to choose: it is refused only where the machine cannot hold it.
        """
        if variant.plan == "paper":
            return str(machine_bytes())
        times = times_smallest(variant.budget)
        if times is None:
            return variant.budget
        return f"{math.ceil(times * smallest_megabytes(bundle, variant.method, length))}MB"

    def in_turn(
        self,
        bundle: Path,
        length: int,
        variants: Sequence[Variant],
        kept: Callable[[dict[str, Any]], Process],
    ) -> dict[Variant, Outcome]:
        """Train every variant `--repeats` times; `kept` is what to keep of each summary."""

        def run(variant: Variant) -> Process:
            process, summary = self.train(bundle, length, variant)
            return process | kept(summary)

        runs = {one.name: partial(run, one) for one in variants}
        outcomes = in_turn(runs, self.config.repeats, self.note)
        return {one: outcomes[one.name] for one in variants}

    def train(
        self, bundle: Path, length: int, variant: Variant, profile: bool = False
    ) -> tuple[Process, dict[str, Any]]:
        """Train for `--steps` in a fresh process: what it measured; its summary, with its plan."""
        settings = {
            "bundle": str(bundle),
            "data": f"random:{self.config.seed}",
            "method": variant.method,
            "plan": variant.plan,
            "budget": self.budget(bundle, length, variant),
            "max_seq_length": length,
            "steps": self.config.steps,
            "save_every": 0,
            "profile": profile,
        }
        with tempfile.TemporaryDirectory(dir=self.runs) as place:
            run = Path(place) / "run"
            summary = measure(settings, run)
            summary["plan"] = json.loads((run / "plan.json").read_text())
            lines = (run / "metrics.jsonl").read_text().splitlines()
        seconds = [json.loads(line)["seconds"] for line in lines]
        keys = ("peak_footprint_bytes", "peak_rss_bytes", "predicted_peak_bytes", "budget_bytes")
        return {"step_s": seconds[1:], **{key: summary[key] for key in keys}}, summary


def _no_pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    return {}


@dataclass(frozen=True)
class Benchmark:
    """One entry of `ondevice bench`.

    `models`, `lengths` (`own_lengths` of some models) and `budgets` are what is measured where
    nothing else is asked for; `pictures` gives PNG bytes by the end of a file's name.
    """

    text: str
    source: Source | None
    models: Sequence[str]
    lengths: Sequence[int]
    rows: Callable[[Bench], Iterator[Row]]
    tables: Callable[[Sequence[Row]], list[Table]]
    notes: Sequence[str] = ()
    pictures: Callable[[Sequence[Row]], Mapping[str, bytes]] = _no_pictures
    budgets: Sequence[str] = ("1GB",)
    own_lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)


def machine_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def seconds(value: float) -> str:
    """Three digits or more: 12.34, 1.23, 0.123, 0.0123."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def around(found: Mapping[str, float] | None, shown: Callable[[float], str]) -> tuple[str, str]:
    """A spread as two cells: the median, and least-most."""
    if found is None:
        return "-", "-"
    return shown(found["median"]), f"{shown(found['low'])}-{shown(found['high'])}"


def times(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def failures(rows: Sequence[Row]) -> list[str]:
    """One line for whatever has no figure, or fewer than were asked for."""
    found: list[str] = []
    for row in rows:
        place = f"{row['model']} at {row['tokens']} tokens"
        if row["failed"]:
            found.append(f"{place}: {row['failed']}")
        for variant in row.get("variants", ()):
            if variant["failed"]:
                found.append(f"{place}, {variant['name']}: {variant['failed']}")
    return found


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the rows themselves have to say (`notes`), and where."""
    return [
        f"{row['model']} at {row['tokens']} tokens: {note}"
        for row in rows
        for note in row.get("notes", ())
    ]
