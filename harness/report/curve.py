"""The learning curve of a run: each evaluation, with the cost of training up to it; and levels.

Invariant: nothing is interpolated. A loss counts as reached at the first evaluation at or below
it, with the steps, passes, seconds and peak memory until then; a loss that no evaluation shows is
not reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from runtime.core.files import read_file, reading_errors
from runtime.core.typed import read_typed
from runtime.run.results import Evaluation, When, read_steps

COLUMNS = ("step", "loss", "seconds", "footprint_bytes")
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the way from the baseline to the goal


@dataclass(frozen=True)
class Point:
    """An evaluation, and the cost of training up to it."""

    step: int
    loss: float
    accuracy: float
    exact: float
    forward_passes: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Curve:
    """A run's evaluations in the order of steps, and each step's measurements, as columns."""

    points: tuple[Point, ...]
    columns: Mapping[str, Sequence[float]]
    peak_bytes: int
    dropped: int  # evaluations whose loss was not a finite number

    @property
    def best(self) -> Point:
        """The evaluation with the lowest loss (the first of equals)."""
        return min(self.points, key=lambda point: point.loss)

    def reached(self, level: float) -> Point | None:
        """The first evaluation at or below `level`."""
        return next((point for point in self.points if point.loss <= level), None)

    def to_json(self) -> dict[str, Any]:
        """The curve as `compare.json` holds it."""
        return {
            "points": [asdict(point) for point in self.points],
            "steps": dict(self.columns),
            "peak_bytes": self.peak_bytes,
            "dropped_evaluations": self.dropped,
        }


def read_curve(run: Path, passes_of_row: int = 1, first_passes: int = 0) -> Curve:
    """The curve of the run in a folder; the run may have ended early.

    A row that was run forward counts as `passes_of_row` passes; `first_passes` came before the
    first step.
    """
    evaluations = read_evaluations(run)
    return make_curve(read_entries(run), evaluations, passes_of_row, first_passes)


def read_evaluations(run: Path) -> dict[str, dict[str, Any]]:
    """The content of a run's evaluations.json; empty without it. Raises BundleError."""
    path = run / "evaluations.json"
    evaluations = read_typed(path, dict[When, Evaluation]) if path.exists() else {}
    plain: dict[str, dict[str, Any]] = msgspec.to_builtins(evaluations)
    return plain


def read_entries(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl; a last one may be half written.

    Raises:
        BundleError: it cannot be read, or a line is damaged.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    with reading_errors(path):
        lines = read_file(path).splitlines(keepends=True)
    whole = len(lines) if not lines or lines[-1].endswith(b"\n") else len(lines) - 1
    steps = read_steps(path, whole, "leave the run out")
    return [msgspec.to_builtins(step) for step in steps]


def make_curve(
    entries: Sequence[Mapping[str, Any]],
    evaluations: Mapping[str, Mapping[str, Any]],
    passes_of_row: int = 1,
    first_passes: int = 0,
) -> Curve:
    """The curve of a run.

    entries: the lines of metrics.jsonl.  evaluations: by "before", "after" or the step's number.
    """
    seconds = [0.0, *accumulate(entry["seconds"] for entry in entries)]
    of_steps = (passes_of_row * entry["forward_passes"] for entry in entries)
    passes = [*accumulate(of_steps, initial=first_passes)]
    # a resumed run is another process, whose peak starts at zero
    peaks = [0, *accumulate((entry["peak_footprint_bytes"] for entry in entries), max)]
    points: dict[int, Point] = {}
    dropped = 0
    for when, evaluation in evaluations.items():
        step = {"before": 0, "after": len(entries)}.get(when)
        step = int(when) if step is None else step
        if step > len(entries):
            continue  # the run was interrupted before this step was saved
        if evaluation["loss"] is None or not math.isfinite(evaluation["loss"]):
            dropped += 1
            continue
        points[step] = Point(
            step=step,
            loss=evaluation["loss"],
            accuracy=evaluation["accuracy"],
            exact=evaluation["exact"],
            forward_passes=passes[step],
            seconds=seconds[step],
            peak_bytes=peaks[step],
        )
    return Curve(
        points=tuple(points[step] for step in sorted(points)),
        columns={name: [entry[name] for entry in entries] for name in COLUMNS},
        peak_bytes=peaks[-1],
        dropped=dropped,
    )


@dataclass(frozen=True)
class Level:
    """A held-out loss, and why it is a level."""

    loss: float
    meaning: str


def levels(baseline: float, curves: Mapping[str, Curve], target: float = 0.0) -> list[Level]:
    """Levels between the loss before training and the goal, and each method's best, downwards.

    The goal is `target` where it is given and lies below the baseline, else the best loss that
    any method reached; there are no levels where no loss fell below the baseline.
    """
    bests = {name: curve.best.loss for name, curve in curves.items() if curve.points}
    goal = target or min(bests.values(), default=baseline)
    meanings: dict[float, list[str]] = {}
    if goal < baseline:
        for share in SHARES:
            loss = goal if share == 1 else baseline - share * (baseline - goal)
            name = "the target" if target and share == 1 else f"{share:.0%} of the way"
            meanings.setdefault(loss, []).append(name)
    for name, best in bests.items():
        if best < baseline:
            meanings.setdefault(best, []).append(f"best of {name}")
    return [Level(loss, ", ".join(meanings[loss])) for loss in sorted(meanings, reverse=True)]
