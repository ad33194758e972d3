"""Dropout of adapter inputs: the masks by token, whatever is drawn together, and their shares."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng

from runtime.arrays.dropout import STEPS, Dropout
from runtime.methods.mebp import StepDropout


def kept(dropout: Dropout, tokens: int, columns: int) -> np.ndarray:
    return np.array(dropout.mask(tokens, columns).remaining)


def test_a_mask_is_threefrys_token_by_token(rng: Rng) -> None:
    """Drawn with one key for each token, as the docstring says, without any batching."""
    key, columns = int(rng.integers(1 << 63)), int(rng.integers(1, 70))
    first, share = int(rng.integers(1 << 20)), float(rng.uniform(0, 1))
    found = kept(Dropout(key, share, first), 9, columns)
    for token, row in enumerate(found):
        bits = reference.token_bits(key, first + token, columns)
        assert np.array_equal(row, bits >= round(share * STEPS))


def test_tiles_and_padding_change_nothing(rng: Rng) -> None:
    dropout, columns = Dropout(int(rng.integers(1 << 63)), 0.3), int(rng.integers(1, 70))
    whole = kept(dropout, 64, columns)
    start, stop = sorted(int(n) for n in rng.choice(65, 2, replace=False))
    assert np.array_equal(kept(dropout.after(start), stop - start, columns), whole[start:stop])
    assert np.array_equal(kept(dropout, 40, columns), whole[:40])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_mean(rng: Rng, share: float) -> None:
    mask = Dropout(int(rng.integers(1 << 63)), share).mask(500, 200)
    found = np.array(mask.remaining)
    assert mask.factor == pytest.approx(1 / (1 - share), rel=1e-4)
    deviation = math.sqrt(share * (1 - share) / found.size)
    assert abs(found.mean() - (1 - share)) <= 6 * deviation + 1 / STEPS
    for axis in (0, 1):  # no token and no column stands out
        means = found.mean(axis=axis)
        assert np.abs(means - (1 - share)).max() <= 7 * math.sqrt(share * (1 - share) / 200) + 1e-4
    x = mx.array(rng.standard_normal(found.shape).astype(np.float32))
    expected = np.where(found, np.array(x), 0) / (1 - share)
    np.testing.assert_allclose(np.array(mask(x)), expected, rtol=1e-4)


def test_a_mask_drops_something_even_where_nearly_all_is_dropped() -> None:
    mask = Dropout(1, 1 - 1e-9).mask(4, 4)
    assert mask.factor == STEPS and not np.array(mask.remaining).all()


def test_every_seed_step_row_and_tensor_has_its_own(rng: Rng) -> None:
    seed, step = int(rng.integers(1000)), int(rng.integers(1000))
    drop = StepDropout(seed, 0.5, step, 2)
    found = {
        "itself": drop.of_tensor("a.q_proj", 1),
        "seed": StepDropout(seed + 1, 0.5, step, 2).of_tensor("a.q_proj", 1),
        "step": StepDropout(seed, 0.5, step + 1, 2).of_tensor("a.q_proj", 1),
        "row": drop.of_tensor("a.q_proj", 0),
        "tensor": drop.of_tensor("a.k_proj", 1),
    }
    masks = {kept(one, 8, 16).tobytes() for one in found.values()}
    assert len(masks) == len(found)
    same = StepDropout(seed, 0.5, step, 1).of_tensor("a.q_proj", 2)  # rows counted from elsewhere
    assert np.array_equal(kept(same, 8, 16), kept(found["itself"], 8, 16))
