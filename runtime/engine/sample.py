"""One element of a batch: a row of tokens, or several packed into one sequence.

It goes through the blocks as one hidden state. Some of its positions have a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.engine.model import Offsets, Positions


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PackedRows:
    """Rows one after another in one sequence, each predicted as if it were alone.

    A row's inputs end before its last token, which is a target only: no token predicts the first of
    the next row.
    """

    rows: tuple[Row, ...]

    @cached_property
    def inputs(self) -> npt.NDArray[np.int64]:
        return np.concatenate([row.inputs for row in self.rows])

    @cached_property
    def offsets(self) -> Offsets:
        """Where each row begins in `inputs`, and where the last one ends."""
        return np.cumsum([0, *(len(row.tokens) - 1 for row in self.rows)])

    @cached_property
    def scored(self) -> Positions:
        """The positions (N,) in `inputs` whose targets have a loss."""
        pairs = zip(self.rows, self.offsets.tolist(), strict=False)
        return np.concatenate([row.scored + start for row, start in pairs])

    @cached_property
    def targets(self) -> npt.NDArray[np.int64]:
        """The targets (N,) that have a loss."""
        return np.concatenate([row.targets for row in self.rows])


Sample = Row | PackedRows
"""One element of a batch, which goes through the blocks as one hidden state."""


def first_scored(sample: Sample) -> npt.NDArray[np.int64]:
    """Where each row's first scored position is among those of the sample."""
    counts = [len(row.scored) for row in sample.rows]
    return np.cumsum([0, *counts[:-1]])
