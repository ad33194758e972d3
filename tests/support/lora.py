"""LoRA settings and prefixes for tests, and bundles with them."""

from __future__ import annotations

import mlx.core as mx
import msgspec
import numpy as np

from runtime.adapters.lora import ALL_LAYERS, ALL_LINEAR, LoraSettings, prefix_settings
from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters

Rng = np.random.Generator


def with_lora(bundle: Bundle, **changes: object) -> Bundle:
    """The bundle with other settings than its default."""
    return bundle.with_lora(msgspec.structs.replace(bundle.manifest.lora, **changes))


def drawn_lora(bundle: Bundle, rng: Rng, dropout: bool) -> LoraSettings:
    """Any settings; half of them have dropout, where it is allowed."""
    names = bundle.manifest.linear_names
    some = rng.choice(names, int(rng.integers(1, len(names) + 1)), replace=False)
    layers = len(bundle.manifest.layers)
    return LoraSettings(
        rank=int(rng.integers(1, 20)),
        alpha=float(rng.uniform(0.5, 30)),
        targets=ALL_LINEAR if rng.random() < 0.3 else tuple(map(str, some)),
        layers=ALL_LAYERS if rng.random() < 0.3 else int(rng.integers(1, layers + 1)),
        dropout=float(rng.uniform(0.05, 0.6)) if dropout and rng.random() < 0.5 else 0.0,
        rslora=bool(rng.random() < 0.5),
    )


def with_prefix(bundle: Bundle, rows: int) -> Bundle:
    return bundle.with_lora(prefix_settings(rows))


def prefix_of(bundle: Bundle, rng: Rng) -> Adapters:
    """A random prefix, which no layer sees as it sees another."""
    adapters = Adapters.initial(bundle.manifest, 0)
    for name, value in adapters.tensors.items():
        adapters.tensors[name] = mx.array(rng.standard_normal(value.shape).astype(np.float32))
    mx.eval(adapters.tensors)
    return adapters
