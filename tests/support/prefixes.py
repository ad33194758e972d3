"""Prefixes of tiny bundles for tests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from runtime.adapters.lora import prefix_settings
from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters

Rng = np.random.Generator


def with_prefix(bundle: Bundle, rows: int) -> Bundle:
    return bundle.with_lora(prefix_settings(rows))


def prefix_of(bundle: Bundle, rng: Rng) -> Adapters:
    """A random prefix, which no layer sees as it sees another."""
    adapters = Adapters.initial(bundle.manifest, 0)
    for name, value in adapters.tensors.items():
        adapters.tensors[name] = mx.array(rng.standard_normal(value.shape).astype(np.float32))
    mx.eval(adapters.tensors)
    return adapters
