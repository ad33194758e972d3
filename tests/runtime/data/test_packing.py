"""Packing rows into sequences: none divided, lost or too long, and little room left."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data import packing
from runtime.data.packing import Packing, pack
from runtime.data.token_rows import Lengths, order

LENGTH = 64
ROWS = st.lists(st.integers(1, LENGTH), min_size=1, max_size=200)


def sequences_of(packed: Packing) -> list[list[int]]:
    return [packed.rows_of(number) for number in range(len(packed))]


def plain_best_fit(lengths: Lengths, ordered: list[int]) -> list[list[int]]:
    """The same by looking at every sequence: longest rows first, each where least room is left."""
    place = {row: at for at, row in enumerate(ordered)}
    found: list[list[int]] = []
    for row in sorted(ordered, key=lambda row: (-lengths[row], place[row])):
        room = [LENGTH - sum(lengths[one] for one in sequence) for sequence in found]
        fits = [(left, number) for number, left in enumerate(room) if left >= lengths[row]]
        if fits:
            found[min(fits)[1]].append(row)
        else:
            found.append([row])
    found = [sorted(sequence, key=place.__getitem__) for sequence in found]
    return sorted(found, key=lambda sequence: place[sequence[0]])


@given(ROWS, st.integers(0, 2**32))
def test_every_row_is_in_one_sequence_that_holds_it(rows: list[int], seed: int) -> None:
    lengths = np.array(rows)
    packed = pack(lengths, LENGTH, seed)
    sequences = sequences_of(packed)
    assert sorted(row for one in sequences for row in one) == list(range(len(rows)))
    sums = [sum(rows[row] for row in one) for one in sequences]
    assert max(sums) <= LENGTH
    assert packed.lengths(lengths).tolist() == sums
    assert sequences == sequences_of(pack(lengths, LENGTH, seed))


@given(ROWS, st.integers(0, 2**32))
def test_packing_is_the_plain_best_fit(rows: list[int], seed: int) -> None:
    lengths = np.array(rows)
    expected = plain_best_fit(lengths, order(seed, 0, len(rows)).tolist())
    assert sequences_of(pack(lengths, LENGTH, seed)) == expected


def test_windows_are_packed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, seed: int
) -> None:
    monkeypatch.setattr(packing, "WINDOW", 20)
    lengths = rng.integers(1, LENGTH + 1, 70)
    ordered = order(seed, 0, 70).tolist()
    expected = [
        sequence
        for at in range(0, 70, 20)
        for sequence in plain_best_fit(lengths, ordered[at : at + 20])
    ]
    assert sequences_of(pack(lengths, LENGTH, seed)) == expected


def test_short_rows_leave_little_room(rng: np.random.Generator, seed: int) -> None:
    lengths = rng.integers(10, 61, 2000)
    packed = pack(lengths, 256, seed)
    assert len(packed) <= math.ceil(lengths.sum() / 256) + 2
    report = packed.report(lengths, (32, 64, 256))
    assert (report.rows, report.sequences, report.length) == (2000, len(packed), 256)
    assert report.most_rows == max(map(len, sequences_of(packed)))
    computed = sum(32 if one <= 32 else 64 for one in lengths)
    assert report.unpacked_padding == pytest.approx(1 - lengths.sum() / computed)
    assert 0 <= report.padding < 0.01 < report.unpacked_padding
    assert report.describe().startswith(f"packed: 2000 rows in {len(packed)} sequences of up to ")


@pytest.mark.parametrize("rows", [[], [3, LENGTH + 1]])
def test_nothing_and_rows_that_are_too_long_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="rows do not go into sequences of 64 tokens"):
        pack(np.array(rows, np.int64), LENGTH, 0)
