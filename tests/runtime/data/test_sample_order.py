"""The order of samples: a function of the seed, in steps of one bucket; rows of other data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data import samples as sample_order
from runtime.data.run_rows import MixedRows
from runtime.data.samples import SampleOrder
from runtime.data.token_rows import RandomRows, order

BUCKETS = (16, 32, 64)
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def samples(seed: int, lengths: list[int], step: int, count: int) -> list[int]:
    found = SampleOrder(seed, np.array(lengths), BUCKETS, step)
    return [found.sample(position) for position in range(count)]


def by_seed(seed: int, n: int, count: int) -> list[int]:
    return [int(row) for epoch in range(count // n + 1) for row in order(seed, epoch, n)][:count]


@given(st.integers(0, 2**32), st.integers(1, 40), st.lists(st.integers(0, 200), min_size=1))
def test_the_sample_of_a_position_needs_no_history(seed: int, n: int, positions: list[int]) -> None:
    unbroken = by_seed(seed, n, 201)
    found = SampleOrder(seed, np.full(n, 9), BUCKETS, 1)
    assert [found.sample(position) for position in positions] == [unbroken[p] for p in positions]


@given(st.integers(0, 2**32), LENGTHS)
def test_one_sample_a_step_comes_in_the_order_of_the_seed(seed: int, lengths: list[int]) -> None:
    n = len(lengths)
    assert samples(seed, lengths, 1, 2 * n) == by_seed(seed, n, 2 * n)


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(2, 9))
def test_samples_of_one_bucket_come_in_the_order_of_the_seed(seed: int, n: int, step: int) -> None:
    lengths = [17 + number % 16 for number in range(n)]
    assert samples(seed, lengths, step, 2 * n) == by_seed(seed, n, 2 * n)


@given(st.integers(0, 2**32), LENGTHS, st.integers(2, 9), st.integers(1, 4))
def test_every_epoch_has_every_sample_once(
    seed: int, lengths: list[int], step: int, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "WINDOW_STEPS", window)
        n = len(lengths)
        found = samples(seed, lengths, step, 4 * n)
        for epoch in range(4):
            assert sorted(found[epoch * n : (epoch + 1) * n]) == list(range(n))
        assert found == samples(seed, lengths, step, 4 * n)


@given(st.integers(0, 2**32), LENGTHS, st.integers(2, 9))
def test_steps_are_of_one_bucket_but_for_few(seed: int, lengths: list[int], step: int) -> None:
    """Of an epoch, at most one step for each border between buckets, and the two at its ends."""
    n = len(lengths)
    found = samples(seed, lengths, step, 3 * n)
    mixed = [0, 0, 0]
    for start in range(0, 3 * n - step + 1, step):
        chosen = found[start : start + step]
        buckets = {next(b for b in BUCKETS if lengths[one] <= b) for one in chosen}
        if start // n == (start + step - 1) // n:
            mixed[start // n] += len(buckets) > 1
    assert max(mixed) <= len(BUCKETS) - 1


def test_steps_of_short_and_of_long_samples_alternate_as_the_seed_has_them(seed: int) -> None:
    """Their order is that of their first samples, so that long ones are not left to the end."""
    lengths = [10, 60] * 50
    found = samples(seed, lengths, 4, 100)
    firsts = [min(by_seed(seed, 100, 100).index(one) for one in found[at : at + 4])
              for at in range(0, 96, 4)]  # fmt: skip
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("own", "others", "share", "added", "few"),
    [(146, 500, 0.1, 15, ""), (3, 500, 0.1, 1, ""), (40, 3, 0.5, 3, " (20 were asked for)")],
)
def test_a_share_is_drawn_by_the_seed(
    own: int, others: int, share: float, added: int, few: str, seed: int
) -> None:
    mine, theirs = RandomRows(seed, 90, 4, own), RandomRows(seed + 1, 90, 6, others)

    def mixed(seed: int) -> list[bytes]:
        rows = MixedRows(mine, theirs, share, seed)
        assert len(rows) == own + added == len(rows.lengths)
        assert rows.lengths.tolist() == [4] * own + [6] * added
        assert rows.describe("d:1%").endswith(f" added to {own} rows{few}")
        return [rows.row(index)[0].tobytes() for index in range(len(rows))]

    known = {theirs.row(index)[0].tobytes() for index in range(others)}
    first = mixed(seed)
    assert first[:own] == [mine.row(index)[0].tobytes() for index in range(own)]
    assert len({*first[own:]}) == added and known >= {*first[own:]}
    assert first == mixed(seed) and (others == added or first != mixed(seed + 1) or added == 1)
    with pytest.raises(IndexError):
        MixedRows(mine, theirs, share, seed).row(own + added)
    assert MixedRows(mine, theirs, share, seed).lengths.dtype == np.int64
