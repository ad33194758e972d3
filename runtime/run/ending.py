"""Why a run is over: its steps, its time, or its held-out loss."""

from __future__ import annotations

import math

from runtime.config.train import TrainConfig
from runtime.run.results import Evaluations, loss_of, no_better_since

ENDS = {  # why a run is over, by the value of `ended`
    "steps": "all its steps are done",
    "seconds": "the time of --stop-seconds has passed",
    "loss": "its held-out loss has reached --stop-loss",
    "rise": "its held-out loss has risen beyond --stop-rise",
    "patience": "its held-out loss was no better for as many evaluations as --patience says",
}
FURTHER = {  # the options by which a run that is over goes on
    "steps": "--steps MORE (or --epochs MORE)",
    "patience": "--patience MORE (and --steps MORE)",
}
FOUND_BY_EVALUATION = ("loss", "rise", "patience")


def ended(config: TrainConfig, done: int, seconds: float, evaluations: Evaluations) -> str:
    """Why a run is over after `done` steps, a key of ENDS; empty while it is not.

    seconds: of all its steps.
    """
    if done >= config.all_steps:
        return "steps"
    if config.stop_seconds and seconds >= config.stop_seconds:
        return "seconds"
    latest = evaluations.get(str(done) if done else "before")
    if latest is None:
        return ""
    now, first = loss_of(latest), evaluations.get("before")
    if config.stop_loss and now <= config.stop_loss:
        return "loss"
    if config.stop_rise and first:
        most = config.stop_rise * loss_of(first)
        if now == math.inf or now > most:
            return "rise"
    since = no_better_since(evaluations, done, config.min_delta)
    return "patience" if config.patience and since >= config.patience else ""
