"""One page of HTML on one or more runs: their losses, footprints, times and settings, overlaid.

It reads a run's own files and changes none. A run that is still being trained has a page too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.report.chart import Chart, Level, Line
from harness.report.curve import Curve, Point, make_curve, read_entries, read_evaluations
from harness.report.page_shell import page, paragraph
from harness.report.table import Table
from runtime.core.documents import from_toml
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import read_file, write_atomic
from runtime.core.lookalikes import Kind, instead, is_comparison
from runtime.core.paths import output_path
from runtime.core.typed import read_typed
from runtime.core.units import format_bytes, format_seconds
from runtime.run.results import Evaluation, final_loss

CONFIG, PLAN, SUMMARY = "config.toml", "plan.json", "summary.json"
ENDS = {"steps": "all steps done"}  # of a summary's "stopped", where its own word says too little
Entry = Mapping[str, Any]  # a line of metrics.jsonl


class _Plan(msgspec.Struct):
    budget_bytes: int


class _Block(msgspec.Struct, omit_defaults=True):
    """The measurements of a block in a profile, where it has them."""

    name: str
    forward_s: float | None = None
    forward_peak_bytes: float | None = None
    backward_s: float | None = None
    backward_peak_bytes: float | None = None


class Summary(msgspec.Struct):
    """What the page shows of a summary, which a run has when it has ended.

    stopped: by what.  also_eval: the evaluations of other data, by the data and by "before" and
    "after".  blocks: each block's measurements, and seconds_per_step: those of a step by kind of
    work; both are empty without `--profile`.
    """

    stopped: str = ""
    also_eval: dict[str, dict[str, Evaluation]] = {}
    blocks: list[_Block] = []
    seconds_per_step: dict[str, float] = {}


@dataclass(frozen=True)
class Run:
    """The content of a run's files."""

    name: str
    settings: Mapping[str, Any]
    budget_bytes: int
    entries: Sequence[Entry]
    curve: Curve
    summary: Summary

    @property
    def work_s(self) -> Mapping[str, float]:
        """The seconds of a step by kind of work."""
        return self.summary.seconds_per_step

    def steps(self, value: Callable[[Entry], float | None]) -> list[tuple[float, float]]:
        """A value of every step, without those that have none."""
        values = [(float(entry["step"]), value(entry)) for entry in self.entries]
        return [(step, number) for step, number in values if number is not None]

    def evaluated(self, value: Callable[[Point], float]) -> list[tuple[float, float]]:
        """A value of every evaluation."""
        return [(float(point.step), value(point)) for point in self.curve.points]


def write_page(paths: Sequence[Path], output: Path) -> list[Run]:
    """Write the page of the runs in `paths`; returns the runs.

    Raises:
        UsageError: a path holds no run, or is given twice.
        BundleError: a run's file is damaged.
    """
    output_path(output)
    same = {path.resolve() for path in paths}
    if len(same) < len(paths):
        raise UsageError(f"a run is given twice: {', '.join(map(str, paths))}; give each once")
    names = [path.resolve().name for path in paths]
    runs = [
        read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]
    write_atomic(output.resolve(), to_html(runs).encode())  # a link stays
    return runs


def read_run(path: Path, name: str) -> Run:
    """The run in a folder.

    Raises:
        UsageError: there is none.
        BundleError: one of its files is damaged.
    """
    if not (path / CONFIG).exists() or is_comparison(path):
        why = instead(path, Kind.RUN) or f"it has no {CONFIG}; give what --output named"
        raise UsageError(f"{path} holds no run: {why}")
    try:
        settings = from_toml(read_file(path / CONFIG))
    except (OSError, ValueError) as problem:
        raise BundleError(f"{path / CONFIG} is damaged: {problem}") from None
    entries = read_entries(path)
    curve = make_curve(entries, read_evaluations(path))
    budget = read_typed(path / PLAN, _Plan).budget_bytes
    ended = (path / SUMMARY).exists()
    summary = read_typed(path / SUMMARY, Summary) if ended else Summary()
    return Run(name, settings, budget, entries, curve, summary)


def to_html(runs: Sequence[Run]) -> str:
    """The page: an overview, charts and settings."""
    title = f"{runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    charts = [chart.html() for chart in charts_of(runs) if not chart.is_empty]
    none = [] if charts else [paragraph("No step has been trained yet.")]
    others = other_losses([(run.name, msgspec.to_builtins(run.summary.also_eval)) for run in runs])
    parts = [_overview(runs).html(), *(table.html() for table in others), *none, *charts]
    if any(run.work_s for run in runs):
        parts.append(_work(runs).html())
    parts += [table.html() for table in _settings(runs)]
    return page(f"Training: {title}", parts)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Every chart that the page may show; those without a measurement are empty."""
    return [
        *_quality_charts(runs),
        *_optimizer_charts(runs),
        _footprint_chart(runs),
        Chart(
            "Time per step",
            "s",
            _lines(runs, lambda run: run.steps(lambda entry: entry["seconds"])),
            from_zero=True,
        ),
        *_block_charts(runs),
    ]


def _lines(
    runs: Sequence[Run],
    values: Callable[[Run], list[tuple[float, float]]],
    suffix: str = "",
    marked: bool = False,
    faint: bool = False,
) -> list[Line]:
    """A line for each run, in the run's colour; `suffix` follows its name."""
    return [
        Line(f"{run.name}{suffix}", index, values(run), marked, faint)
        for index, run in enumerate(runs)
    ]


def _quality_charts(runs: Sequence[Run]) -> list[Chart]:
    trained = _lines(
        runs, lambda run: run.steps(lambda entry: entry.get("loss")), ", training", faint=True
    )
    held_out = _lines(
        runs, lambda run: run.evaluated(lambda point: point.loss), ", held out", marked=True
    )
    accuracies = _lines(
        runs, lambda run: run.evaluated(lambda point: 100 * point.accuracy), marked=True
    )
    return [
        Chart("Loss", "nats per token", [*trained, *held_out]),
        Chart("Next-token accuracy on held-out data", "%", accuracies),
    ]


def _optimizer_charts(runs: Sequence[Run]) -> list[Chart]:
    """The learning rate, and the norm of the gradients of methods that have them."""
    rates = _lines(runs, lambda run: run.steps(lambda entry: entry["learning_rate"]))
    norms = _lines(runs, lambda run: run.steps(lambda entry: entry.get("gradient_norm")))
    return [
        Chart("Learning rate", "", rates, from_zero=True),
        Chart("Norm of the gradients before clipping", "", norms, from_zero=True),
    ]


def _footprint_chart(runs: Sequence[Run]) -> Chart:
    """The footprint after each step and its peak so far, below the budgets."""
    now = _lines(runs, lambda run: run.steps(lambda entry: entry["footprint_bytes"] / 1e6), ", now")
    peaks = _lines(
        runs,
        lambda run: run.steps(lambda entry: entry["peak_footprint_bytes"] / 1e6),
        ", peak so far",
        faint=True,
    )
    budgets: dict[int, Level] = {}
    for index, run in enumerate(runs):
        text = f"budget {format_bytes(run.budget_bytes)}"
        level = Level(text, index, run.budget_bytes / 1e6)
        budgets.setdefault(run.budget_bytes, level)
    levels = tuple(budgets.values())
    return Chart("Footprint of the process", "MB", [*now, *peaks], levels, from_zero=True)


def _block_charts(runs: Sequence[Run]) -> list[Chart]:
    """Memory and time of each block, forward and backward (the MeBP paper's Figure 2)."""
    longest = max((run.summary.blocks for run in runs), key=len)
    # "model.layers.3" is shown as 3; the other blocks have names of their own
    places = [block.name.rpartition(".")[2] for block in longest]

    def points(run: Run, key: str, scale: float) -> list[tuple[float, float]]:
        values = [(float(at), getattr(block, key)) for at, block in enumerate(run.summary.blocks)]
        return [(place, value * scale) for place, value in values if value is not None]

    def lines(key: str, scale: float) -> list[Line]:
        forward = _lines(
            runs, lambda run: points(run, f"forward_{key}", scale), ", forward", faint=True
        )
        return forward + _lines(
            runs, lambda run: points(run, f"backward_{key}", scale), ", backward"
        )

    look: dict[str, Any] = {"from_zero": True, "across": "block", "places": places}
    return [
        Chart("Most memory allocated in each block", "MB", lines("peak_bytes", 1e-6), **look),
        Chart("Time per step in each block", "s", lines("s", 1.0), **look),
    ]


def _work(runs: Sequence[Run]) -> Table:
    """The seconds of a step by kind of work, of the runs that were profiled."""
    measured = [run for run in runs if run.work_s]
    kinds = dict.fromkeys(kind for run in measured for kind in run.work_s)

    def longest(kind: str) -> float:
        return max(run.work_s.get(kind, 0.0) for run in measured)

    rows = [
        (kind, *(format_seconds(run.work_s.get(kind, 0.0)) for run in measured))
        for kind in sorted(kinds, key=longest, reverse=True)
    ]
    head = ("work of a step", *(run.name for run in measured))
    return Table("Where the time of a step goes", [head, *rows], left=1)


def _overview(runs: Sequence[Run]) -> Table:
    head = (
        "run", "method", "state", "steps", "final training loss", "best held-out loss",
        "step (median)", "peak footprint", "budget",
    )  # fmt: skip
    return Table("Runs", [head, *map(_row, runs)], left=3)


def other_losses(
    measured: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]],
) -> list[Table]:
    """A table of losses on other data before and after training, for (name, evaluations)."""
    rows = [
        (name, Path(data).name, *(_loss(evaluations.get(when)) for when in ("before", "after")))
        for name, others in measured
        for data, evaluations in others.items()
    ]
    head = ("run", "data", "loss before", "loss after")
    return [Table("Other data: what was forgotten", [head, *rows], left=2)] if rows else []


def _loss(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "-"
    loss = evaluation["loss"]
    return "not finite" if loss is None else f"{loss:.4f}"


def _row(run: Run) -> tuple[str, ...]:
    seconds = [entry["seconds"] for entry in run.entries]
    final = final_loss([loss for _, loss in run.steps(lambda entry: entry.get("loss"))])
    best = run.curve.best if run.curve.points else None
    wanted = run.settings.get("steps", "?")
    stopped = run.summary.stopped
    state = ENDS.get(stopped, f"ended by {stopped}") if stopped else "not ended"
    return (
        run.name,
        str(run.settings.get("method", "?")),
        state,
        f"{len(run.entries)} of {wanted}",
        "-" if final is None else f"{final:.4f}",
        f"{best.loss:.4f} at step {best.step}" if best else "-",
        format_seconds(statistics.median(seconds)) if seconds else "-",
        format_bytes(run.curve.peak_bytes) if seconds else "-",
        format_bytes(run.budget_bytes),
    )


def _settings(runs: Sequence[Run]) -> list[Table]:
    """The runs' settings: those that differ, and those that are common to all."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = {name: [_text(run.settings.get(name)) for run in runs] for name in names}
    differ = [(name, *values) for name, values in rows.items() if len({*values}) > 1]
    common = [(name, values[0]) for name, values in rows.items() if len({*values}) == 1]
    tables = []
    if differ:
        head = ("setting", *(run.name for run in runs))
        tables.append(Table("Settings that differ", [head, *differ], left=len(head)))
    title = "Settings" if len(runs) == 1 else "Settings of all"
    return [*tables, Table(title, [("setting", "value"), *common], left=2)]


def _text(value: object) -> str:
    return "-" if value is None else str(value)
