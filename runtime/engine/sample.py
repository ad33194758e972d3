"""One element of a batch: a row of tokens, or several packed into one sequence.

It goes through the blocks as one hidden state. Some of its positions have a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.engine.model import Offsets, Positions


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens (n+1,): the first n are inputs, the last n their targets.

    `scored` (N,) holds the positions of the inputs whose targets have a loss, in increasing order.
    """

    tokens: npt.NDArray[Any]
    scored: Positions

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        return self.tokens[:-1].astype(np.int64)

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The targets (N,) that have a loss."""
        return self.tokens[1 + self.scored].astype(np.int64)

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self,)

    @property
    def offsets(self) -> None:
        """None: the sequence is one row."""


class NumberedRows(Protocol):
    """Rows by number: each row's tokens (n+1,), and its scored positions (N,)."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[npt.NDArray[Any], Positions]: ...


class PackedRows:
    """Rows one after another in one sequence, each predicted as if it were alone.

    A row's inputs end before its last token, which is a target only: no token predicts the first of
    the next row. However many rows there are, a few arrays hold them.
    """

    __slots__ = ("_tokens", "offsets", "scored")

    def __init__(self, rows: Sequence[Row]) -> None:
        self._tokens = np.concatenate([row.tokens for row in rows])
        # where each row begins in `inputs`, and where the last one ends
        self.offsets: Offsets = np.cumsum([0, *(len(row.tokens) - 1 for row in rows)])
        pairs = zip(rows, self.offsets.tolist(), strict=False)
        # the positions (N,) in `inputs` whose targets have a loss
        self.scored: Positions = np.concatenate([row.scored + start for row, start in pairs])

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        last = self.offsets[1:] + np.arange(len(self.offsets) - 1)
        return np.delete(self._tokens, last).astype(np.int64)

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The targets (N,) that have a loss."""
        row = np.searchsorted(self.offsets, self.scored, side="right") - 1
        targets: npt.NDArray[np.int64] = self._tokens[self.scored + row + 1].astype(np.int64)
        return targets

    @property
    def rows(self) -> tuple[Row, ...]:
        """Each row by itself: views of the sequence's tokens."""
        places = enumerate(pairwise(self.offsets.tolist()))
        return tuple(
            Row(self._tokens[start + row : stop + row + 1], self._scored(start, stop))
            for row, (start, stop) in places
        )

    def _scored(self, start: int, stop: int) -> Positions:
        first, last = np.searchsorted(self.scored, (start, stop))
        return self.scored[first:last] - start


Sample = Row | PackedRows
"""One element of a batch, which goes through the blocks as one hidden state."""


def first_scored(sample: Sample) -> npt.NDArray[np.int64]:
    """Where each row's first scored position is among those of the sample."""
    counts = [len(row.scored) for row in sample.rows]
    return np.cumsum([0, *counts[:-1]])


SAMPLE_BYTES = 100  # of a sample's object, and of its places in lists
ARRAY_BYTES = 150  # of an array of NumPy besides its numbers


def sample_bytes(tokens: int, packed: bool) -> int:
    """The most bytes of a sample of so many tokens: the tokens, and which of them are scored.

    Of a packed one, whose rows may have a token each, also the targets only, and where rows begin.
    """
    of_token = (4 + 4, 8, 8) if packed else (4, 8)
    return sum(of_token) * tokens + len(of_token) * ARRAY_BYTES + SAMPLE_BYTES
