"""`ondevice bench machine`: the heap's values are found again from what they explain."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bench.machine import PREDICTED_UNDER, PREDICTED_WITHIN, fit

Rng = np.random.Generator
MIDDLE = (PREDICTED_WITHIN - PREDICTED_UNDER) / 2


def test_a_fit_finds_values_that_predict_in_the_middle_of_the_target(rng: Rng) -> None:
    true = {
        "flat_bytes": float(rng.integers(500_000, 2_000_000)),
        "share": float(rng.uniform(0.02, 0.2)),
        "share_of_backward": float(rng.uniform(0.02, 0.2)),
        "share_of_logits": float(rng.uniform(0.1, 0.9)),
        "share_of_kept": float(rng.uniform(0.01, 0.1)),
    }
    processes = []
    for _ in range(40):
        features = {name: float(rng.uniform(1e6, 40e6)) for name in true} | {"flat_bytes": 1.0}
        predicted = sum(value * features[name] for name, value in true.items())
        fixed = float(rng.uniform(30e6, 60e6))
        # measured so that the prediction's relative error is `MIDDLE`
        peak = (fixed + predicted) / (1 + MIDDLE)
        processes.append(
            {
                "features": features,
                "peak_footprint_bytes": peak,
                "extra_bytes": peak - fixed,
                "mapped": False,
            }
        )
    outlier = processes[0] | {"extra_bytes": 1e9, "mapped": True}  # not fitted
    found = fit([{"variants": [{"processes": [*processes, outlier]}]}])
    for name, value in true.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01, abs=0.001)
