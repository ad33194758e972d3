"""Hessians summed over tokens: against plain products, and their memory."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from export.quantize.gram import ALIGN, Gram, add_bytes, block_extents, gram_bytes, tied_hessian

Rng = np.random.Generator


def full(gram: Gram) -> np.ndarray:
    """The Hessian (C, C), with zeros between its blocks."""
    found = np.zeros((gram.columns, gram.columns), np.float32)
    for (start, stop), block in zip(gram.extents, gram.blocks, strict=True):
        found[start:stop, start:stop] = np.triu(block) + np.triu(block, 1).T
    return found


def added(x: np.ndarray, block: int) -> Gram:
    gram = Gram(x.shape[1], block)
    gram.add(x)
    return gram


@pytest.mark.parametrize("block", [128, 300, 512, 4096])
def test_blocks_cover_the_columns_once(rng: Rng, block: int) -> None:
    for columns in (*rng.integers(1, 3000, 20).tolist(), 128, 256, 10240):
        extents = block_extents(columns, block)
        assert extents[0][0] == 0
        assert extents[-1][1] == columns
        assert all(a[1] == b[0] for a, b in pairwise(extents))
        assert all(start % ALIGN == 0 for start, _ in extents)
        sizes = [stop - start for start, stop in extents]
        assert min(sizes) > 0
        assert max(sizes) <= block
        assert gram_bytes(columns, block) == 4 * sum(size**2 for size in sizes)
        if columns % ALIGN == 0 and columns > block:
            assert max(sizes) - min(sizes) <= ALIGN


def test_a_block_smaller_than_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="127 columns"):
        block_extents(256, 127)


@pytest.mark.parametrize("block", [128, 256, 1024])
def test_sums_are_the_products_of_all_tokens(rng: Rng, block: int) -> None:
    columns = 64 * int(rng.integers(5, 12))
    x = rng.standard_normal((90, columns)).astype(np.float32)
    gram = Gram(columns, block)
    for part in np.array_split(x, 4):
        gram.add(part)
    expected = np.zeros((columns, columns))
    for start, stop in gram.extents:
        part = x[:, start:stop].astype(np.float64)
        expected[start:stop, start:stop] = part.T @ part
    np.testing.assert_allclose(full(gram), expected, rtol=0, atol=1e-3)
    assert gram.tokens == 90
    assert gram.mean_diagonal == pytest.approx(np.square(x).sum() / columns, rel=1e-4)


def test_nothing_is_added_to_what_was_taken(rng: Rng) -> None:
    x = rng.standard_normal((4, 64)).astype(np.float32)
    gram = added(x, 64)
    (block,) = gram.take()
    assert block.shape == (64, 64)
    with pytest.raises(ValueError, match="take"):
        gram.add(x)
    with pytest.raises(ValueError, match="32"):
        Gram(64, 64).add(x[:, :32])


def test_adding_takes_no_more_than_it_says(rng: Rng) -> None:
    columns, block = 1536, 768
    x = rng.standard_normal((64, columns)).astype(np.float32)
    tracemalloc.start()
    try:
        gram = Gram(columns, block)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        gram.add(x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held == pytest.approx(gram_bytes(columns, block), abs=20_000)
    assert peak - held <= add_bytes(columns, block) + 20_000
    assert add_bytes(columns, block) < gram_bytes(columns, block) / 8


@pytest.mark.parametrize("block", [128, 512])
def test_tied_is_the_head_scaled_plus_one(rng: Rng, block: int) -> None:
    x = (7 * rng.standard_normal((50, 384))).astype(np.float32)
    head = full(added(x, block))
    expected = head / np.diagonal(head).mean() + np.eye(384)
    np.testing.assert_allclose(full(tied_hessian(added(x, block))), expected, atol=1e-5)
    assert (full(tied_hessian(added(0 * x, block))) == np.eye(384)).all()
