"""Rows of other data beside a run's own: how many, which, and their places."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.data.rows import RandomRows
from runtime.data.run_rows import MixedRows


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
