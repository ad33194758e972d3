"""The head's pass over the vocabulary by threads, each with a part of it.

A thread keeps maximum m, sum z and G of its own rows, as `runtime.operations.head_kernel` does of
all. At the end those of all threads are joined, in their order, as if the largest m had grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet
from runtime.arrays.side_by_side import Floats, Part
from runtime.arrays.threads import steps


@dataclass
class Running:
    """What a pass has seen of the logits of one set of hidden states h (N, D)."""

    h: Floats
    bias: Floats | None  # (V,)
    cap: float | None
    best: Floats  # m (N, 1)
    total: Floats  # z (N, 1)
    weighted: Floats | None  # G (N, D), if it is wanted
    predicted: npt.NDArray[np.int32] | None  # (N,), if they are wanted

    @classmethod
    def of(
        cls, h: Floats, bias: Floats | None, cap: float | None, gradient: bool, predictions: bool
    ) -> Running:
        count = len(h)
        weighted = np.zeros(h.shape, np.float32) if gradient else None
        predicted = np.zeros(count, np.int32) if predictions else None
        best = np.full((count, 1), -np.inf, np.float32)
        return cls(h, bias, cap, best, np.zeros((count, 1), np.float32), weighted, predicted)

    @quiet
    def add(self, part: Part, rows: slice, tile: Floats, memory: Floats) -> None:
        """Add the logits of a range of W's rows, whose values are the tile (r, D)."""
        shape = len(self.h), len(tile)
        logits = memory[: shape[0] * shape[1]].reshape(shape)
        part.blas.multiply(self.h, tile.T, logits)
        if self.bias is not None:
            np.add(logits, self.bias[rows], out=logits)
        slope = self._capped(logits)
        top = logits.max(axis=1, keepdims=True)
        if self.predicted is not None:
            places = logits.argmax(axis=1) + rows.start
            np.copyto(self.predicted, places, where=(top > self.best)[:, 0], casting="same_kind")
        new = np.maximum(self.best, top)
        np.exp(np.subtract(logits, new, out=logits), out=logits)
        self._fade(new)
        self.total += logits.sum(axis=1, keepdims=True)
        if self.weighted is not None:
            if slope is not None:
                np.multiply(logits, slope, out=logits)
            part.blas.multiply(logits, tile, self.weighted, add=True)

    def _capped(self, logits: Floats) -> Floats | None:
        """Cap the logits; returns the slope over the products, if it is wanted and not 1."""
        if self.cap is None:
            return None
        cap = np.float32(self.cap)
        np.tanh(np.divide(logits, cap, out=logits), out=logits)
        slope = None if self.weighted is None else np.float32(1) - np.square(logits)
        np.multiply(logits, cap, out=logits)
        return slope

    def _fade(self, new: Floats) -> None:
        """Replace the maximum by one that is no smaller."""
        fade, self.best = np.exp(self.best - new), new
        self.total *= fade
        if self.weighted is not None and not (fade == 1).all():
            self.weighted *= fade

    @quiet
    def join(self, other: Running) -> None:
        """Take in what another thread has seen of later rows, which is consumed."""
        if self.predicted is not None and other.predicted is not None:
            np.copyto(self.predicted, other.predicted, where=(other.best > self.best)[:, 0])
        new = np.maximum(self.best, other.best)
        for each in (self, other):
            each._fade(new)
        self.total += other.total
        if self.weighted is not None and other.weighted is not None:
            self.weighted += other.weighted


def run(part: Part, lanes: Sequence[Sequence[Running]], most: int) -> list[Running]:
    """Pass over all rows of W; `lanes` have a state for each thread, of which the first is left.

    A thread dequantizes at most `most` rows at once.
    """
    matrix, threads = part.matrix, part.threads
    count = max(len(lane[0].h) for lane in lanes)

    def task(number: int) -> None:
        tile = np.empty((most, matrix.columns), np.float32)
        memory = np.empty(count * most, np.float32)
        for rows in steps(part.rows_of(number), most):
            values = part.tile(number, rows, tile[: rows.stop - rows.start])
            for lane in lanes:
                lane[number].add(part, rows, values, memory)
            part.drop(rows)

    threads.run(task)
    for first, *others in lanes:
        for other in others:
            first.join(other)
    return [lane[0] for lane in lanes]
