"""Rows of other data that are added to those that a run trains on, so that it forgets less."""

from __future__ import annotations

import numpy as np

from runtime.core.units import counted
from runtime.data.report import DataReport
from runtime.data.rows import Lengths, Positions, Rows, Tokens, order

DRAW = -1  # in place of an epoch's number


class MixedRows:
    """The own rows, then some of the others: `share` times as many, drawn by the seed.

    At least one is drawn, and each at most once. `mixed` is the report of the others.
    """

    def __init__(self, own: Rows, others: Rows, share: float, seed: int) -> None:
        self._own, self._others = own, others
        self.wanted = max(1, round(share * len(own)))
        self._drawn = order(seed, DRAW, len(others))[: self.wanted]
        self.report: DataReport | None = own.report
        self.mixed: DataReport | None = others.report

    def __len__(self) -> int:
        return len(self._own) + len(self._drawn)

    @property
    def lengths(self) -> Lengths:
        return np.concatenate([self._own.lengths, self._others.lengths[self._drawn]])

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`, see Rows. Raises IndexError if there is no such row."""
        at = index - len(self._own)
        return self._own.row(index) if at < 0 else self._others.row(int(self._drawn[at]))

    def describe(self, data: str) -> str:
        """What was added, in one line."""
        count, few = len(self._drawn), ""
        if count < self.wanted:
            few = f" ({self.wanted} were asked for)"
        return (
            f"{counted(count, 'row')} of the {len(self._others)} in {data} "
            f"{'is' if count == 1 else 'are'} added to {counted(len(self._own), 'row')}{few}"
        )
