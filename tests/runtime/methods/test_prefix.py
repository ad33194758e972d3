"""Prefix tuning beside mlx-lm's model with joined keys: losses, gradients, steps, first values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from oracles.estimators import MonolithicMeZO
from oracles.prefix import keys_and_values, prefix_gradients
from support.bundles import Rng, Tiny
from support.estimators import copy_of, mezo_of, same
from support.lora import prefix_of, with_prefix
from support.models import agree, each_family, mebp, model_of, packed_of, rows_of

from runtime.core.errors import UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.first_prefix import fill_prefix
from runtime.methods.noise import Noise


@each_family
def test_losses_and_gradients_are_the_dense_models(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str
) -> None:
    """Rows longer than Gemma's window of 16, whose tokens see the prefix nevertheless."""
    bundle = with_prefix(tiny(family), int(rng.choice([1, 3, 5, 20])))
    adapters, rows = prefix_of(bundle, rng), rows_of(bundle, rng)
    loss, expected = prefix_gradients(bundle, adapters, [(row.tokens, row.scored) for row in rows])
    model = model_of(bundle, 32)
    assert reference.plain_loss(model, adapters, rows) == pytest.approx(loss, rel=1e-5)
    for kept in (0, len(bundle.manifest.layers)):
        found, gradients = mebp(model, adapters, rows, tmp_path, kept)
        assert found.loss_sum / found.scored_tokens == pytest.approx(loss, rel=1e-5)
        agree(gradients, expected, 3e-5)
    alone = Adapters(adapters.manifest, {n: v * 0 for n, v in adapters.tensors.items()})
    assert abs(reference.plain_loss(model, alone, rows) - loss) > 1e-4


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_all_packed_rows_see_the_prefix(tiny: Tiny, rng: Rng, tmp_path: Path, family: str) -> None:
    bundle = with_prefix(tiny(family), 4)
    adapters, packed = prefix_of(bundle, rng), packed_of(bundle, rng, 29, 12)
    loss, expected = prefix_gradients(bundle, adapters, packed)
    found, gradients = mebp(model_of(bundle, 32), adapters, [packed], tmp_path)
    assert found.loss_sum / found.scored_tokens == pytest.approx(loss, rel=1e-5)
    agree(gradients, expected, 3e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_steps_are_the_monolithic_algorithms_bit_for_bit(
    tiny: Tiny, rng: Rng, seed: int, family: str, tmp_path: Path
) -> None:
    bundle = with_prefix(tiny(family), 3)
    model = model_of(bundle, 16, tile_values=20_000, attention_block=9, chunk_rows=700)
    adapters = prefix_of(bundle, rng)
    noise = Noise(seed)
    oracle = MonolithicMeZO(copy_of(adapters), noise, 1e-3, 2, 0.1)
    method = mezo_of(model, adapters, tmp_path, noise, 2, queries=2, weight_decay=0.1, lanes=3)
    for step in range(3):
        rows = rows_of(bundle, rng, (7, 15))
        _, gradients = oracle.step(model, rows, step, 0.05)
        assert method.step(step, 0.05, [rows]).record == [0.05, gradients]
    method.settle()
    same(oracle.adapters, adapters)


@each_family
def test_it_begins_as_the_models_own_keys_and_values(
    tiny: Tiny, rng: Rng, seed: int, family: str
) -> None:
    rows = int(rng.choice([1, 5, 16]))
    bundle = with_prefix(tiny(family), rows)
    adapters, asked = Adapters.initial(bundle.manifest, seed), list[np.ndarray]()
    model = model_of(bundle, 16)

    def embed(tokens: np.ndarray) -> mx.array:
        asked.append(tokens)
        return model.embed(tokens)

    watched = replace(model)
    object.__setattr__(watched, "embed", embed)
    fill_prefix(lambda length: watched, adapters, seed, 16)
    (tokens,) = asked
    assert len(tokens) == rows and 0 <= tokens.min() <= tokens.max() < bundle.manifest.vocab_size
    expected = keys_and_values(bundle, tokens)
    for block, pair in zip(bundle.manifest.layers, expected, strict=True):
        (name,) = bundle.manifest.adapted(block)
        for full, value in zip(bundle.manifest.adapter_names(block, name), pair, strict=True):
            assert reference.relative_error(adapters.tensors[full], value) < 1e-5, full
    again = Adapters.initial(bundle.manifest, seed)
    fill_prefix(lambda length: model, again, seed, 16)
    assert all(mx.array_equal(again.tensors[n], one) for n, one in adapters.tensors.items())
    other = Adapters.initial(bundle.manifest, seed)
    fill_prefix(lambda length: model, other, seed + 1, 16)
    assert not any(mx.array_equal(other.tensors[n], one) for n, one in adapters.tensors.items())
    with pytest.raises(UsageError, match=f"--prefix-length {rows} is too long for sequences of"):
        fill_prefix(lambda length: model, again, seed, rows - 1)
