"""Models whose parameters are float64 compute in float64: their gradients are their slopes."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from oracles import double
from oracles import whole_model as reference
from support.models import (
    CLOSE,
    Rng,
    Tiny,
    adapters_of,
    agree,
    errors_of,
    model_of,
    row_of,
)

STEP = 1e-5  # what float32 rounds would be a hundredth of the slope


@pytest.mark.parametrize("family", ["gemma4", "lfm2", "qwen3_5"])
def test_gradients_are_slopes(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family)
    adapters, row = adapters_of(bundle, rng), row_of(bundle, rng, 20)
    rows = [(row.tokens, row.scored)]
    model = reference.in_double(reference.dense_model(bundle, adapters))
    _, gradients = reference.gradients(model, rows)
    name = max(gradients)
    path, _, tensor = name.rpartition(".")
    module = dict(model.named_modules())[path]
    value, losses = module[tensor], []
    with double.computing():
        direction = double.widened(rng.standard_normal(value.shape))
        for sign in (1, -1):
            module[tensor] = value + sign * STEP * direction
            losses.append(reference.batch_loss(model, rows).item())
        slope = (gradients[name] * direction).sum().item()
    assert (losses[0] - losses[1]) / (2 * STEP) == pytest.approx(slope, rel=1e-7, abs=10 * STEP**2)


@pytest.mark.parametrize("family", ["gemma4", "lfm2", "qwen3_5"])
def test_gradients_from_states_are_those_there(tiny: Tiny, rng: Rng, family: str) -> None:
    """A model's own inputs change nothing; another input is seen, and moves gradients."""
    bundle = tiny(family)
    adapters, row = adapters_of(bundle, rng), row_of(bundle, rng, 20)
    rows = [(row.tokens, row.scored)]
    states = reference.hidden_states(model_of(bundle, 32), adapters, row)
    layers = [block.name for block in bundle.manifest.layers]
    dense = reference.in_double(reference.dense_model(bundle, adapters))
    _, plain = reference.gradients(dense, rows)
    with reference.from_states(dense, layers, [states]) as errors:
        _, same = reference.gradients(dense, rows)
    assert len(errors) == len(layers)
    assert max(errors) <= CLOSE
    agree(same, plain, 1e-4)
    states[1] = states[1] * 1.01
    with reference.from_states(dense, layers, [states]) as errors:
        _, moved = reference.gradients(dense, rows)
    assert [error > CLOSE for error in errors] == [at in (1, 2) for at in range(len(layers))]
    assert max(errors_of(moved, plain).values()) > 1e-4


def test_functions_are_those_of_numpy(rng: Rng) -> None:
    x = rng.standard_normal((3, 50)) * 4
    powers = np.exp(x)
    with double.computing():
        wide = double.widened(x)
        _, (slopes,) = mx.vjp(mx.erf, [wide], [mx.ones_like(wide)])
        found = {
            "exp": (mx.exp(wide), powers),
            "sigmoid": (mx.sigmoid(wide), powers / (1 + powers)),
            "softmax": (mx.softmax(wide), powers / powers.sum(axis=-1, keepdims=True)),
            "logsumexp": (mx.logsumexp(wide), np.log(powers.sum(axis=-1))),
            "logaddexp": (mx.logaddexp(wide, -wide), np.logaddexp(x, -x)),
            "erf": (mx.erf(wide), np.vectorize(math.erf)(x)),
            "slopes of erf": (slopes, 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
        }
        for name, (value, expected) in found.items():
            np.testing.assert_allclose(np.array(value), expected, 1e-11, 1e-15, err_msg=name)
