"""The comparison of two heads, chunk by chunk, against whole distributions in double precision."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from oracles.whole_model import dequantized
from support.lengths import first_of
from support.models import Tiny, model_of

from runtime.engine.divergence import compare_heads
from runtime.engine.model import Model

F64 = npt.NDArray[np.float64]


def log_probabilities(model: Model, h: mx.array) -> F64:
    """The logarithm of the whole distribution (N, V)."""
    w = np.array(dequantized(model.weights, model.head_matrix)).astype(np.float64)
    logits = np.array(h).astype(np.float64) @ w.T
    logits -= logits.max(axis=1, keepdims=True)
    found: F64 = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


@first_of("family", "gemma3", "qwen2")
def test_divergence_and_losses_are_those_of_whole_distributions(
    tiny: Tiny, rng: np.random.Generator, family: str
) -> None:
    first, second = (model_of(tiny(family, bits=bits), 32) for bits in (8, 4))
    width, vocabulary = first.bundle.manifest.hidden_size, first.head_matrix.rows
    source_hs, hs, targets = [], [], []
    for count in (7, 20):
        h = rng.normal(size=(count, width)).astype(np.float32) * 4
        source_hs.append(mx.array(h))
        hs.append(mx.array(h + 0.3 * rng.normal(size=h.shape).astype(np.float32)))
        targets.append(rng.integers(0, vocabulary, count))
    found = compare_heads(first, second, source_hs, hs, targets)
    for one, source_h, h, chosen in zip(found, source_hs, hs, targets, strict=True):
        p, q = log_probabilities(first, source_h), log_probabilities(second, h)
        expected = (np.exp(p) * (p - q)).sum(axis=1)
        assert expected.max() > 0.01
        np.testing.assert_allclose(one.divergence, expected, rtol=1e-4, atol=2e-5)
        places = np.arange(len(chosen))
        np.testing.assert_allclose(one.source_loss, -p[places, chosen], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one.loss, -q[places, chosen], rtol=1e-5, atol=1e-5)


def test_a_model_does_not_diverge_from_itself(tiny: Tiny, rng: np.random.Generator) -> None:
    model = model_of(tiny("llama"), 32)
    h = mx.array(rng.normal(size=(9, model.bundle.manifest.hidden_size)).astype(np.float32))
    (found,) = compare_heads(model, model, [h], [h], [np.arange(9)])
    assert np.abs(found.divergence).max() < 1e-5
    assert (found.loss == found.source_loss).all()
