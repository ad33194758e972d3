"""Attention to a ring of past keys: the plain attention of the whole sequence."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng

from runtime.arrays.arrays import Arrays
from runtime.operations.attention import slots_of
from runtime.operations.cached_attention_kernel import Ring
from runtime.operations.prefix_kernel import Scoring


@pytest.mark.parametrize(
    ("window", "cap", "sunk"),
    [(None, None, False), (5, None, False), (40, None, True), (5, 1.5, True)],
)
def test_parts_of_a_sequence_attend_as_the_whole(
    rng: Rng, window: int | None, cap: float | None, sunk: bool, arrays: Arrays
) -> None:
    heads, groups, width, out = 4, 2, 8, 6
    length = int(rng.integers(60, 100))

    def drawn(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    q, k = drawn(1, heads, length, width), drawn(1, groups, length, width)
    v, scale = drawn(1, groups, length, out), 0.3
    sinks = drawn(heads) if sunk else None
    expected = reference.attention(q, k, v, scale, window, None, cap, sinks)
    slots = slots_of(length, window)
    ring = Ring(mx.zeros((1, groups, slots, width)), mx.zeros((1, groups, slots, out)), arrays)
    at = 0
    while at < length:
        count = min(int(rng.choice([1, 3, 16])), length - at)
        part = slice(at, at + count)
        padding = int(rng.integers(0, 17 - count))  # written, and written over by what follows
        new = [mx.concatenate([one[:, :, part], 1e3 + drawn(1, groups, padding, one.shape[3])], 2)
               for one in (k, v)]  # fmt: skip
        ring.write(*new, at)
        queries = mx.concatenate([q[:, :, part], drawn(1, heads, padding, width)], 2)
        found = ring.attend(queries, at, Scoring(scale, window, None, cap, sinks))[:, :, :count]
        assert mx.allclose(found, expected[:, :, part], rtol=1e-5, atol=1e-5)
        at += count
