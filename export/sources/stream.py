"""Several values that go from layer to layer as the columns of one array."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx


@dataclass(frozen=True)
class Stream:
    """The columns of an array (1, T, C) between two layers: names and widths, in order."""

    widths: tuple[tuple[str, int], ...]

    @property
    def columns(self) -> int:
        return sum(width for _, width in self.widths)

    def split(self, x: mx.array) -> dict[str, mx.array]:
        """The parts of x by name, which a block has as values of their own once it is cut."""
        names, widths = zip(*self.widths, strict=True)
        ends = [*accumulate(widths)][:-1]
        return dict(zip(names, mx.split(x, ends, axis=-1) if ends else [x], strict=True))

    def join(self, parts: dict[str, mx.array]) -> mx.array:
        """The array of these parts; others are left out."""
        chosen = [parts[name] for name, _ in self.widths]
        return mx.concatenate(chosen, axis=-1) if len(chosen) > 1 else chosen[0]
