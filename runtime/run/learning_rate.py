"""The learning rate of each step: a warm-up, then a schedule."""

from __future__ import annotations

import math


def learning_rate(peak: float, schedule: str, warmup_steps: int, steps: int, step: int) -> float:
    """The rate of step `step` (0-based): a linear warm-up to `peak`, then the schedule to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak
