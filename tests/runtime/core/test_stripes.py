"""Stripes: the slices of a file make the file."""

from __future__ import annotations

import pytest
from support.bundles import Rng

from runtime.core.stripes import STRIPE, Stripes


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_make_any_range_of_the_file(rng: Rng, count: int) -> None:
    whole = rng.bytes(7 * STRIPE + 1234)
    slices = []
    for index in range(count):
        pieces = Stripes(index, count).pieces(0, len(whole))
        slices.append(b"".join(whole[a:b] for a, b in pieces))
        assert len(slices[-1]) == Stripes(index, count).before(len(whole))
    assert sum(map(len, slices)) == len(whole)
    for _ in range(50):
        start, stop = sorted(int(at) for at in rng.integers(0, len(whole) + 1, 2))
        out = bytearray(stop - start)
        for index, own in enumerate(slices):
            at, end = Stripes(index, count).portion(start, stop)
            for a, b in Stripes(index, count).pieces(start, stop):
                out[a:b] = own[at : at + b - a]
                at += b - a
            assert at == end
        assert out == whole[start:stop]
