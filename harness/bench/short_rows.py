"""Short random rows of different lengths, as the benchmark `packing` trains on them."""

from __future__ import annotations

import numpy as np

from runtime.data.rows import Lengths, Positions, RandomRows, Tokens

SHORTEST, LONGEST = 10, 60  # tokens of a row
COUNT = 64


class ShortRows:
    """COUNT rows of SHORTEST to LONGEST tokens, which depend on the seed; all tokens are scored."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.report = None
        self._rows = RandomRows(seed, vocab_size, LONGEST, COUNT)
        drawn, _ = RandomRows(seed, LONGEST - SHORTEST + 1, COUNT - 1, 1).row(0)
        self.lengths: Lengths = SHORTEST + drawn.astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`. Raises IndexError if there is none."""
        length = int(self.lengths[index])
        return self._rows.row(index)[0][: length + 1], np.arange(length)
