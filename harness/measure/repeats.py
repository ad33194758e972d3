"""Repeated measurements: fresh processes, taken in turn, and what their figures have in common.

Variants run A B A B, so that whatever drifts on the machine meets all of them; ratios are taken
within a turn. Invariant: a variant that fails keeps its reason and is never dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ondevice.errors import InterruptedRunError, OnDeviceError

Process = dict[str, Any]  # of one fresh process: `step_s` (without the first), peaks, and more
Spread = dict[str, float]  # median, low (the least) and high (the most)
Note = Callable[[str], None]


@dataclass
class Outcome:
    """What a variant's processes measured; `failed` says why there are no more of them."""

    processes: list[Process] = field(default_factory=list)
    failed: str | None = None


def in_turn(
    variants: Mapping[str, Callable[[], Process]], repeats: int, note: Note
) -> dict[str, Outcome]:
    """Run every variant `repeats` times, in turn; one that has failed is not tried again.

    Raises:
        InterruptedRunError: we were asked to stop.
    """
    outcomes = {name: Outcome() for name in variants}
    for turn in range(repeats):
        for name, run in variants.items():
            outcome = outcomes[name]
            if outcome.failed is None:
                note(f"{name}: process {turn + 1} of {repeats}")
                try:
                    outcome.processes.append(run())
                except OnDeviceError as problem:
                    outcome.failed = reason(problem)
                    note(f"{name}: {outcome.failed}")
    return outcomes


def reason(problem: OnDeviceError) -> str:
    """What is wrong, without the ways out of a run that nobody will go on with.

    Raises:
        InterruptedRunError: it is no failure but a wish to stop.
    """
    if isinstance(problem, InterruptedRunError):
        raise problem
    return str(problem).partition("; ")[0]


def spread(values: Sequence[float]) -> Spread | None:
    """The median, least and most; None of nothing."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def figures(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON: all timed steps together, the largest peaks, and every process."""
    processes = outcome.processes
    return {
        "failed": outcome.failed,
        "step_s": spread([one for process in processes for one in process["step_s"]]),
        **{
            f"peak_{kind}_bytes": max(
                (process[f"peak_{kind}_bytes"] for process in processes), default=None
            )
            for kind in ("footprint", "rss")
        },
        "processes": processes,
    }


def time_ratio(over: Outcome, under: Outcome) -> Spread | None:
    """How many times longer a step of `over` takes, turn by turn; None where one was not run."""
    pairs = zip(over.processes, under.processes, strict=False)  # the turns that both have
    medians = statistics.median
    return spread([medians(a["step_s"]) / medians(b["step_s"]) for a, b in pairs])


def peak_ratio(over: Outcome, under: Outcome) -> float | None:
    """The ratio of the largest footprints; None where one was not run."""
    a, b = (figures(outcome)["peak_footprint_bytes"] for outcome in (over, under))
    return a / b if a and b else None
