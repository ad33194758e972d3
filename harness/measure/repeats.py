"""Repeated measurements in fresh processes, with alternating variants, and their statistics.

Variants run A B A B, so that a drift of the machine affects all of them alike; ratios are between
processes of the same turn. Invariant: a variant that fails stays, with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.core.errors import InterruptedRunError, OnDeviceError
from runtime.core.notes import Note

INTERRUPTED = "interrupted"
Process = dict[str, Any]  # its measurements: `step_s` (the timed steps), peaks, and more
Spread = dict[str, float]  # median, low (the least) and high (the most)


@dataclass
class Outcome:
    """The measurements of a variant's processes, in order; `failed` says why they ended."""

    processes: list[Process] = field(default_factory=list)
    failed: str | None = None


def in_turn(
    variants: Mapping[str, Callable[[], Process]],
    repeats: int,
    note: Note,
    once: Collection[str] = (),
) -> dict[str, Outcome]:
    """Run every variant `repeats` times, alternately; a failed one is not tried again.

    once: variants that run only once, in the first turn.

    A signal ends all of them: those with turns left have INTERRUPTED as their reason.

    Raises:
        InterruptedRunError: a signal arrived before the first process was finished.
    """
    outcomes = {name: Outcome() for name in variants}
    turns = {name: 1 if name in once else repeats for name in variants}
    try:
        for turn in range(repeats):
            for name, run in variants.items():
                outcome = outcomes[name]
                if outcome.failed is not None or turn >= turns[name]:
                    continue
                note(f"{name}: process {turn + 1} of {repeats}")
                try:
                    outcome.processes.append(run())
                except OnDeviceError as problem:
                    outcome.failed = reason(problem)
                    note(f"{name}: {outcome.failed}")
    except (InterruptedRunError, KeyboardInterrupt):
        if not any(outcome.processes for outcome in outcomes.values()):
            raise
        for name, outcome in outcomes.items():
            if outcome.failed is None and len(outcome.processes) < turns[name]:
                outcome.failed = INTERRUPTED
    return outcomes


def reason(problem: OnDeviceError) -> str:
    """The message of an error, without the advice on how to continue.

    Raises:
        InterruptedRunError: the problem is that a signal arrived, which is no failure.
    """
    if isinstance(problem, InterruptedRunError):
        raise problem
    return str(problem).partition("; ")[0]


def spread(values: Sequence[float]) -> Spread | None:
    """The median, the least and the most; None if there are no values."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def figures(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON: all timed steps together, the largest peaks, and every process."""
    processes = outcome.processes
    return {
        "failed": outcome.failed,
        "step_s": spread([seconds for process in processes for seconds in process["step_s"]]),
        "peak_footprint_bytes": most(outcome, "peak_footprint_bytes"),
        "peak_rss_bytes": most(outcome, "peak_rss_bytes"),
        "processes": processes,
    }


def most(outcome: Outcome, key: str) -> int | None:
    """The largest value of any process; None if none ran."""
    return max((process[key] for process in outcome.processes), default=None)


def time_ratio(over: Outcome, under: Outcome) -> Spread | None:
    """How many times longer a step of `over` takes, turn by turn; None if one did not run."""
    return turn_ratio(over, under, lambda process: statistics.median(process["step_s"]))


def turn_ratio(over: Outcome, under: Outcome, value: Callable[[Process], float]) -> Spread | None:
    """The ratios of `value` within the turns in which both ran; None if there are none."""
    pairs = zip(over.processes, under.processes, strict=False)
    return spread([value(a) / value(b) for a, b in pairs])


def peak_ratio(over: Outcome, under: Outcome) -> float | None:
    """The ratio of the largest footprints; None if one did not run."""
    a, b = (most(outcome, "peak_footprint_bytes") for outcome in (over, under))
    return a / b if a and b else None
