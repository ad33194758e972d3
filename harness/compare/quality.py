"""Steps to quality: what each method had spent when its held-out loss first reached a level.

Invariant: nothing is interpolated. A level counts as reached at the first evaluation at or below
it, with the steps, passes, seconds and peak that were spent by then; what no evaluation of a
method shows is not reached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the way from the baseline to the goal
COLUMNS = ("step", "loss", "seconds", "footprint_bytes")


@dataclass(frozen=True)
class Point:
    """An evaluation, and all that training had spent by then."""

    step: int
    loss: float
    accuracy: float
    exact: float
    forward_passes: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Level:
    """A held-out loss, and what it stands for."""

    loss: float
    meaning: str


@dataclass(frozen=True)
class Curve:
    """A method's evaluations by step, and what each of its steps measured, as columns."""

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
        """What `compare.json` keeps of it."""
        return {
            "points": [asdict(point) for point in self.points],
            "steps": dict(self.columns),
            "peak_bytes": self.peak_bytes,
            "dropped_evaluations": self.dropped,
        }


def read_curve(run: Path) -> Curve:
    """The curve of a run, also of one that ended early."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    evaluations = json.loads((run / "evaluations.json").read_text())
    return make_curve([json.loads(line) for line in lines], evaluations)


def make_curve(
    entries: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Mapping[str, Any]]
) -> Curve:
    """The curve of a run's steps and its evaluations ("before", "after", or after which step)."""
    seconds = [0.0, *accumulate(entry["seconds"] for entry in entries)]
    passes = [0, *accumulate(entry["forward_passes"] for entry in entries)]
    # a resumed run is another process; its peak starts anew
    peaks = [0, *accumulate((entry["peak_footprint_bytes"] for entry in entries), max)]
    points: dict[int, Point] = {}
    dropped = 0
    for when, found in evaluations.items():
        step = {"before": 0, "after": len(entries)}.get(when)
        step = int(when) if step is None else step
        if step > len(entries):
            continue  # of a step that is lost, and was to be run again
        if not math.isfinite(found["loss"]):
            dropped += 1
            continue
        points[step] = Point(
            step=step,
            loss=found["loss"],
            accuracy=found["accuracy"],
            exact=found["exact"],
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


def ladder(baseline: float, curves: Mapping[str, Curve], target: float = 0.0) -> list[Level]:
    """Levels between the loss before training and the goal, and each method's best, downwards.

    The goal is `target` where it is given and lies below the baseline, else the best loss that
    any method reached; there are no levels where nothing fell below the baseline.
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
