"""Logits of one model, computed by the engine and by mlx-lm, and how far apart they are."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from ondevice.bundle.store import Bundle
from runtime.methods.adapters import Adapters
from support.models import model_of

Tokens = np.ndarray


def engine_logits(bundle: Bundle, adapters: Adapters | None, tokens: Tokens) -> np.ndarray:
    """The logits (T, V) of the bundle with the adapters, for tokens (T,)."""
    bucket = next(one for one in bundle.manifest.buckets if one >= len(tokens))
    model = model_of(bundle, bucket)
    x = model.embed(tokens)
    for block in bundle.manifest.layers:
        x = model.forward(block, x, {} if adapters is None else adapters.loras(block))
    h = model.hidden(x, np.arange(len(tokens)))
    return np.array(model.label_logits(h, np.arange(bundle.manifest.vocab_size), {}))


def mlx_lm_logits(folder: Path, tokens: Tokens) -> np.ndarray:
    """The logits (T, V) of a checkpoint folder as mlx-lm loads it."""
    model, _ = load_model(folder)
    return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest logit."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
