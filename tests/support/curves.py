"""Learning curves that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.curve import Curve, make_curve


def entry(step: int, seconds: float = 2.0, passes: int = 1, peak: int = 100) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0,
        "seconds": seconds,
        "forward_passes": passes,
        "footprint_bytes": peak - 10,
        "peak_footprint_bytes": peak,
    }


def evaluation(loss: float) -> dict[str, Any]:
    return {"loss": loss, "accuracy": 0.5 - loss / 20, "exact": 0.0}


def curve_of(losses: Mapping[str, float], steps: int, **more: Any) -> Curve:
    found = {when: evaluation(loss) for when, loss in losses.items()}
    return make_curve([entry(step + 1, **more) for step in range(steps)], found)
