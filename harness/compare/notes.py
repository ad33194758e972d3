"""The notes below a comparison's table: its conditions, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.compare.lengths import PASSES_WITH_BACKWARD, evaluated_every, passes_of_row
from harness.compare.trials import Finding
from harness.config.compare import CompareConfig
from harness.report.curve import Curve

FEW = 5  # evaluations, the one before training among them
RISE = 0.1  # share of the loss's fall: a larger rise after the best loss gets a note


def notes(config: CompareConfig, findings: Mapping[str, Finding]) -> list[str]:
    """The notes of a comparison, one text each."""
    curves = {
        name: finding.curve
        for name, finding in findings.items()
        if finding.curve and finding.curve.points
    }
    before = next(iter(curves.values())).points[0].loss
    said = [*_definitions(config, list(findings)), *_condition_notes(config, curves, before)]
    for name, finding in findings.items():
        if finding.outcome != "finished":
            said.append(f"{name} is {finding.outcome}: {finding.reason}.")
        said += _sweep_notes(name, finding)
        if name in curves:
            said += _curve_notes(name, curves[name], before, bool(finding.tried))
    return said


def _definitions(config: CompareConfig, methods: Sequence[str]) -> list[str]:
    """The meaning of each column of costs, and of a level that is reached."""
    twice = [method for method in methods if passes_of_row(method) > 1]
    return [
        "Training seconds are those of the steps, without evaluations, saves and the sweep.",
        "A level is reached at the first evaluation at or below it; evaluated every "
        + ", ".join(f"{_steps(evaluated_every(config, method))} ({method})" for method in methods)
        + ".",
        "A forward pass is one row through all blocks."
        + (
            f" A row of {' and '.join(twice)} counts as {PASSES_WITH_BACKWARD}: it is computed "
            "again for its gradient, which costs about as much as a third pass."
            if twice
            else ""
        )
        + f" Methods are judged by {config.judged_by.replace('_', ' ')}.",
        "Peak MB is the process's largest footprint until then, its evaluations included.",
    ]


def _condition_notes(
    config: CompareConfig, curves: Mapping[str, Curve], before: float
) -> list[str]:
    """Notes on a target that no run had to reach, and on runs of different lengths."""
    said = []
    if config.target_loss >= before:
        said.append("The loss before training is already at the target.")
    lengths = {name: len(curve.columns["step"]) for name, curve in curves.items()}
    if len(set(lengths.values())) > 1:
        said.append(
            "The methods ran for different numbers of steps: "
            + ", ".join(f"{name} {steps:,}" for name, steps in lengths.items())
            + "."
        )
    passes = {name: curve.points[-1].forward_passes for name, curve in curves.items()}
    if config.equal == "forward-passes" and len(set(passes.values())) > 1:
        said.append(
            "Steps are whole, so the forward passes differ: "
            + ", ".join(f"{name} {count:,}" for name, count in passes.items())
            + "."
        )
    return said


def _curve_notes(name: str, curve: Curve, before: float, was_swept: bool) -> list[str]:
    """Notes on too few evaluations, and on a best loss at the beginning, at the end or before."""
    said = []
    if curve.dropped:
        said.append(f"{curve.dropped} evaluations of {name} were not finite and are left out.")
    if len(curve.points) < FEW:
        said.append(
            f"{name} was evaluated {len(curve.points)} times only, so what it cost is rough: "
            f"give a smaller --eval-every ({name}={max(1, len(curve.columns['step']) // 10)})."
        )
    best, last = curve.best, curve.points[-1]
    if best.step == 0:
        said.append(f"{name} never fell below the loss before training.")
    elif best.step == last.step:
        said.append(f"{name}'s best loss is its last: it might have fallen further.")
    elif best.loss + RISE * (before - best.loss) < last.loss:
        why = (
            "a rate that is best in a short sweep can be too high for a longer run; give more "
            "--sweep-steps or lower rates"
            if was_swept
            else "its rate may be too high for so many steps, or the rows too few"
        )
        said.append(f"{name}'s loss rose again after step {best.step:,}: {why}.")
    return said


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _sweep_notes(name: str, finding: Finding) -> list[str]:
    if not finding.tried:
        return (
            []
            if finding.trial is None
            else [f"{name} was not swept: there was one combination of values to try."]
        )
    if finding.chosen is None or finding.trial is None:
        return [f"No trial of {name} finished; give it other values to try."]
    said = [
        f"{name}'s {tried.trial} did well in the sweep, but {tried.reason}; the next best trial "
        "was run. A longer sweep (--sweep-steps) would have shown it."
        for tried in finding.tried
        if tried.loss is not None and tried.outcome != "finished"
    ]
    best = finding.tried[finding.chosen]
    if best.loss is not None and best.loss_before is not None and best.loss >= best.loss_before:
        said.append(f"No trial of {name} fell below the loss before training in its sweep.")
    for option, value in finding.trial.values.items():
        values = sorted({tried.trial.values[option] for tried in finding.tried})
        if len(values) > 1 and value in (values[0], values[-1]):
            end = "smallest" if value == values[0] else "largest"
            said.append(
                f"{name}'s best {option.replace('_', ' ')}, {value:g}, is the {end} that was "
                "tried; a value beyond it may be better."
            )
    return said
