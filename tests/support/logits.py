"""Logits of one model, computed by the engine and by mlx-lm, and how far apart they are."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters
from support.models import model_of

Tokens = np.ndarray


def exact_factor(bundle: Bundle) -> float:
    """What Gemma's embedding lacks because mlx-lm rounds its factor, √width, to bfloat16."""
    if bundle.manifest.family != "gemma3_text":
        return 1.0
    factor = bundle.manifest.config["hidden_size"] ** 0.5
    return float(factor / mx.array(factor, mx.bfloat16).item())


def engine_logits(
    bundle: Bundle, adapters: Adapters | None, tokens: Tokens, factor: float = 1.0
) -> np.ndarray:
    """The logits (T, V) of the bundle with the adapters, for tokens (T,).

    The first layer's input is multiplied by `factor`.
    """
    bucket = next(one for one in bundle.manifest.buckets if one >= len(tokens))
    model = model_of(bundle, bucket)
    first, *layers, last = (
        (block, {} if adapters is None else adapters.loras(block)) for block in model.blocks
    )
    x = model.embed(tokens, first[1]) * factor
    for block, loras in layers:
        x = model.forward(block, x, loras)
    h = model.hidden(x, np.arange(len(tokens)))
    return np.array(model.label_logits(h, np.arange(bundle.manifest.vocab_size), last[1]))


def mlx_lm_logits(folder: Path, tokens: Tokens, factor: float = 1.0) -> np.ndarray:
    """The logits (T, V) of a checkpoint folder as mlx-lm loads it, its embedding times `factor`."""
    model, _ = load_model(folder)
    batch = mx.array(tokens)[None]
    if factor == 1.0:
        found = model(batch)
    else:
        found = model(batch, input_embeddings=model.model.embed_tokens(batch) * factor)
    return np.array(found[0].astype(mx.float32))


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest logit."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def typical(found: np.ndarray, expected: np.ndarray) -> float:
    """The median over the tokens of (T, V) logits of their relative distance.

    For programs that round more than float32 does: of random tokens, a few weigh such roundings
    several times as much as the others do, and would decide a mean.
    """
    distances = np.linalg.norm(found.astype(np.float64) - expected, axis=1)
    return float(np.median(distances / np.linalg.norm(expected, axis=1)))
