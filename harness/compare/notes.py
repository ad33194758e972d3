"""The notes below a comparison's table: its conditions, and what it does not show."""

from __future__ import annotations

from collections.abc import Mapping

from harness.compare.lengths import PASSES_WITH_BACKWARD, evaluated_every, passes_of_row
from harness.compare.trials import Finding
from harness.config.compare import CompareConfig

FEW = 5  # evaluations, the one before training among them
RISE = 0.1  # share of the loss's fall: a larger rise after the best loss gets a note


def notes(config: CompareConfig, found: Mapping[str, Finding]) -> list[str]:
    """The notes of a comparison, one text each."""
    twice = [name for name in found if passes_of_row(name) > 1]
    said = [
        "Training seconds are those of the steps, without evaluations, saves and the sweep.",
        "A level is reached at the first evaluation at or below it; evaluated every "
        + ", ".join(f"{_steps(evaluated_every(config, name))} ({name})" for name in found)
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
    runs = {name: one.curve for name, one in found.items() if one.curve and one.curve.points}
    before = next(iter(runs.values())).points[0].loss
    if config.target_loss >= before:
        said.append("The loss before training is already at the target.")
    lengths = {name: len(curve.columns["step"]) for name, curve in runs.items()}
    if len(set(lengths.values())) > 1:
        said.append(
            "The methods ran for different numbers of steps: "
            + ", ".join(f"{name} {steps:,}" for name, steps in lengths.items())
            + "."
        )
    passes = {name: curve.points[-1].forward_passes for name, curve in runs.items()}
    if config.equal == "forward-passes" and len(set(passes.values())) > 1:
        said.append(
            "Steps are whole, so the forward passes differ: "
            + ", ".join(f"{name} {count:,}" for name, count in passes.items())
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
        if len(curve.points) < FEW:
            said.append(
                f"{name} was evaluated {len(curve.points)} times only, so what it cost is rough: "
                f"give a smaller --eval-every ({name}={max(1, len(curve.columns['step']) // 10)})."
            )
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
            "The times and the memory of blocks come from a short profiled run, which is slower "
            "than the run itself; their memory is the most that the array allocator held."
        )
    said += [
        f"The profile of {name} did not finish; its blocks are not shown."
        for name, one in found.items()
        if name in runs and one.profile is None
    ]
    return said


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _sweep_notes(name: str, one: Finding) -> list[str]:
    if not one.tried:
        return (
            []
            if one.trial is None
            else [f"{name} was not swept: there was one combination of values to try."]
        )
    if one.chosen is None or one.trial is None:
        return [f"No trial of {name} finished; give it other values to try."]
    said = [
        f"{name}'s {tried.trial} did well in the sweep, but {tried.reason}; the next best trial "
        "was run. A longer sweep (--sweep-steps) would have shown it."
        for tried in one.tried
        if tried.loss is not None and tried.outcome != "finished"
    ]
    best = one.tried[one.chosen]
    if best.loss is not None and best.loss_before is not None and best.loss >= best.loss_before:
        said.append(f"No trial of {name} fell below the loss before training in its sweep.")
    for option, value in one.trial.values.items():
        values = sorted({tried.trial.values[option] for tried in one.tried})
        if len(values) > 1 and value in (values[0], values[-1]):
            end = "smallest" if value == values[0] else "largest"
            said.append(
                f"{name}'s best {option.replace('_', ' ')}, {value:g}, is the {end} that was "
                "tried; a value beyond it may be better."
            )
    return said
