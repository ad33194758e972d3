"""Random settings of rotary positions, for comparisons with what transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np

Rng = np.random.Generator


def some(rng: Rng, **settings: Any) -> dict[str, Any]:
    """A random part of these settings."""
    return {name: value for name, value in settings.items() if rng.random() < 0.5}


def settings_of(kind: str, rng: Rng, dims: int = 32) -> dict[str, Any]:
    """Random settings of a rope_type, of heads of so many numbers."""
    length = int(rng.choice([64, 256, 4096]))
    original = {"original_max_position_embeddings": length}
    factor = float(rng.uniform(1, 40))
    if kind == "linear":
        return {"factor": factor}
    if kind == "llama3":
        low, high = float(rng.uniform(0.5, 2)), float(rng.uniform(3, 8))
        needed = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        return {**needed, **some(rng, **original)}
    mscales = rng.uniform(0.1, 2, 2).tolist()
    if kind == "yarn":
        return {"factor": factor} | some(
            rng,
            **original,
            attention_factor=float(rng.uniform(0.5, 2)) if rng.random() < 0.3 else None,
            beta_fast=float(rng.uniform(8, 64)),
            beta_slow=float(rng.uniform(0.5, 4)),
            mscale=mscales[0],
            mscale_all_dim=mscales[1],
            truncate=bool(rng.random() < 0.3),
        )
    assert kind == "longrope"
    factors = rng.uniform(1, 4, dims // 2).tolist()
    return {
        "short_factor": factors,
        "long_factor": factors,
        **some(rng, **original, factor=factor, attention_factor=float(rng.uniform(0.5, 2))),
    }
