"""What a comparison found, as data: `compare.json`.

Invariant: everything that was tried is in it, also what diverged or did not fit; nothing in it is
the path of a machine. Tables, plots and the page are drawn from it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.compare.quality import Curve, ladder
from harness.compare.verdict import verdict
from harness.measure.process import PATHS, provenance
from ondevice.config.compare import CompareConfig, by_method
from runtime.system.backend import describe


@dataclass(frozen=True)
class Trial:
    """A method with the settings that a sweep is about."""

    method: str
    learning_rate: float
    epsilon: float | None = None
    queries: int = 1

    @property
    def name(self) -> str:
        """The name of its run folder."""
        end = "" if self.epsilon is None else f"-epsilon-{self.epsilon!r}"
        return f"{self.method}-{self.learning_rate!r}{end}"

    def __str__(self) -> str:
        end = "" if self.epsilon is None else f", epsilon {self.epsilon:g}"
        return f"learning rate {self.learning_rate:g}{end}"


@dataclass(frozen=True)
class Tried:
    """One run of a sweep: how it ended, and its held-out loss before and after."""

    trial: Trial
    outcome: str
    reason: str
    loss_before: float | None
    loss: float | None
    training_s: float | None


@dataclass(frozen=True)
class Finding:
    """A method's sweep and its run: `outcome` is finished, diverged or over budget."""

    trial: Trial | None
    tried: tuple[Tried, ...]
    chosen: int | None
    outcome: str
    reason: str
    curve: Curve | None
    summary: dict[str, Any] | None
    profile: dict[str, Any] | None


def findings(config: CompareConfig, found: Mapping[str, Finding]) -> dict[str, Any]:
    """The report of a comparison in which some method has a curve."""
    curves = {name: one.curve for name, one in found.items() if one.curve and one.curve.points}
    baseline = next(iter(curves.values())).points[0]
    levels = [
        {
            "loss": level.loss,
            "meaning": level.meaning,
            "reached": {
                name: asdict(point) if (point := curve.reached(level.loss)) else None
                for name, curve in curves.items()
            },
        }
        for level in ladder(baseline.loss, curves, config.target_loss)
    ]
    return {
        "settings": _settings(config),
        **provenance(),
        "machine": describe(),
        "budget_bytes": config.budget_bytes,
        "baseline": {"loss": baseline.loss, "accuracy": baseline.accuracy},
        "verdict": verdict(levels),
        "levels": levels,
        "methods": {name: _method(one) for name, one in found.items()},
        "sweep": {
            name: {
                "steps": by_method(config.sweep_steps)[name],
                "tried": [asdict(tried) for tried in one.tried],
                "chosen": one.chosen,
            }
            for name, one in found.items()
            if one.tried
        },
        "notes": notes(config, found),
    }


def _settings(config: CompareConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(config).items()
        if key != "output"
    }
    names = {key: settings[key] for key in PATHS if settings[key] is not None}
    return settings | {key: Path(value).name for key, value in names.items()}


def _method(one: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "outcome": one.outcome,
        "reason": one.reason,
        "trial": None if one.trial is None else asdict(one.trial),
        "summary": one.summary,
        "profile": one.profile,
        "curve": None,
    }
    if one.curve is not None and one.curve.points:
        steps = one.curve.columns["step"]
        result |= {
            "steps": len(steps),
            "stopped": None if one.summary is None else one.summary["stopped"],
            "training_s": sum(one.curve.columns["seconds"]),
            "best": asdict(one.curve.best),
            "last": asdict(one.curve.points[-1]),
            "curve": one.curve.to_json(),
        }
    return result


RISE = 0.1  # of what a method had gained, lost again


def notes(config: CompareConfig, found: Mapping[str, Finding]) -> list[str]:
    """What a reader of the table has to know, and what the comparison leaves open."""
    every = by_method(config.eval_every)
    said = [
        "Training seconds are those of the steps, without evaluations, saves and the sweep.",
        "A level is reached at the first evaluation at or below it; evaluated every "
        + ", ".join(f"{every[name]} steps ({name})" for name in found)
        + ".",
        "A forward pass is one row through all blocks. A step of mebp also recomputes each block "
        "and runs it backward, so passes are no measure of cost between methods; seconds are.",
        "Peak MB is the process's largest footprint until then, its evaluations included.",
    ]
    runs = {name: one.curve for name, one in found.items() if one.curve and one.curve.points}
    before = next(iter(runs.values())).points[0].loss
    if config.target_loss >= before:
        said.append("The loss before training is at the target already.")
    lengths = {name: len(curve.columns["step"]) for name, curve in runs.items()}
    if len(set(lengths.values())) > 1:
        said.append(
            "The methods ran for different numbers of steps: "
            + ", ".join(f"{name} {steps:,}" for name, steps in lengths.items())
            + "."
        )
    for name, one in found.items():
        if one.outcome != "finished":
            said.append(f"{name} is {one.outcome}: {one.reason}.")
        said += _sweep_notes(name, one)
        curve = runs.get(name)
        if curve is None:
            continue
        if curve.dropped:
            said.append(f"{curve.dropped} evaluations of {name} were not finite and are left out.")
        if curve.best.step == 0:
            said.append(f"{name} never fell below the loss before training.")
        elif curve.best.step == curve.points[-1].step:
            said.append(f"{name}'s best loss is its last: it might have fallen further.")
        elif curve.best.loss + RISE * (before - curve.best.loss) < curve.points[-1].loss:
            why = (
                "a rate that is best in a short sweep can be too high for a longer run; give more "
                "--sweep-steps or lower rates"
                if one.tried
                else "its rate may be too high for so many steps, or the rows too few"
            )
            said.append(f"{name}'s loss rose again after step {curve.best.step:,}: {why}.")
    if any(one.profile for one in found.values()):
        said.append(
            "Blocks are those of a short profiled run, which is slower than the run itself; their "
            "memory is what the array allocator held at most, not the process."
        )
    said += [
        f"The profile of {name} did not finish; its blocks are not shown."
        for name, one in found.items()
        if name in runs and one.profile is None
    ]
    return said


def _sweep_notes(name: str, one: Finding) -> list[str]:
    if not one.tried:
        return [] if one.trial is None else [f"{name} was not swept: its grid has one point."]
    if one.chosen is None or one.trial is None:
        return [f"No try of {name} could be finished; give it another grid."]
    said = [
        f"{name}'s {spoilt.trial} did well in the sweep, but {spoilt.reason}; the next best was "
        "taken. More --sweep-steps would have told."
        for spoilt in one.tried
        if spoilt.loss is not None and spoilt.outcome != "finished"
    ]
    best = one.tried[one.chosen]
    if best.loss is not None and best.loss_before is not None and best.loss >= best.loss_before:
        said.append(f"No try of {name} fell below the loss before training in its sweep.")
    for what in ("learning_rate", "epsilon"):
        values = sorted({getattr(tried.trial, what) for tried in one.tried})
        value = getattr(one.trial, what)
        if len(values) > 1 and value in (values[0], values[-1]):
            end = "smallest" if value == values[0] else "largest"
            said.append(
                f"{name}'s best {what.replace('_', ' ')}, {value:g}, is the {end} that was tried; "
                "a wider grid may hold a better one."
            )
    return said
