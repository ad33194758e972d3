"""The head kernel: the loss, its gradient and the predictions without ever holding all logits.

One pass over the vocabulary in chunks of rows of W keeps a running maximum m, sum z and, for
training, G = sum_j exp(l_j - m) W_j, rescaled whenever m grows (as FlashAttention does over keys):

    loss = m + log z - l_target        d loss / d h = G / z - W_target

Where logits are capped, l = c tanh(h W^T / c), row j of W counts 1 - (l_j / c)^2 times in G.

Each chunk is read and dequantized once for all batch lanes; the result of a lane does not depend on
the others. Callers pass only positions that have a target. The reference is
`tests.oracles.whole_model.head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, row_sums
from runtime.arrays.matrices import Matrices
from runtime.arrays.products import Products
from runtime.arrays.stored import Matrix
from runtime.arrays.tiles import Input, ReadyTile, RowSum
from runtime.arrays.values import Move
from runtime.operations.logits_kernel import Shaping

Targets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeadResult:
    """Per position: loss (N,), the most likely token (N,), and dh (N, D) of the summed loss.

    Predictions cost a pass over the logits, and are computed only on request.
    """

    loss: mx.array
    predicted: mx.array | None
    dh: mx.array | None


@dataclass
class _Lane:
    """The running state of one set of positions."""

    given: Input
    chosen: mx.array  # W_target (N, D)
    best: mx.array
    total: mx.array
    predicted: mx.array | None
    arrays: Arrays
    weighted: RowSum
    targets: Targets
    shaping: Shaping
    backward: Products | None

    def add(self, chunk: ReadyTile, start: int, gradient: bool) -> None:
        """Add the logits of a chunk of the vocabulary, whose first row is `start`."""
        logits = self.shaping.of_tile(chunk.transposed_product(self.given), start, self.arrays)
        self.arrays.settle(logits)
        top = self.arrays.row_max(logits)
        if self.predicted is not None:
            place = logits.argmax(axis=-1).astype(mx.int32) + start
            self.predicted = mx.where(top[:, 0] > self.best[:, 0], place, self.predicted)
            self.arrays.settle(self.predicted)
        new = mx.maximum(self.best, top)
        fade = mx.exp(self.best - new)
        slope = self.shaping.slope(logits, self.arrays) if gradient else None
        p = self.arrays.exp_below(logits, new)
        del logits
        self.total = self.total * fade + row_sums(p)
        self.best = new
        if slope is not None:
            self.arrays.settle(self.total)
            p = self.arrays.times(p, slope)
            del slope
        if gradient:
            chunk = chunk if self.backward is None else replace(chunk, products=self.backward)
            self.weighted.add(Input.for_rows(p, chunk.products), chunk, fade)
        self.arrays.settle(self.best, self.total)

    @property
    def state(self) -> list[mx.array]:
        """The arrays that go on from chunk to chunk."""
        state = [self.best, self.total, *self.weighted.parts]
        return state if self.predicted is None else [*state, self.predicted]

    def result(self, gradient: bool, matrix: Matrix, products: Products) -> HeadResult:
        scores = row_sums(products.rounded(self.given.x) * self.chosen)[:, 0]
        target_logit = self.shaping.of_rows(scores, self.targets, self.arrays)[:, None]
        loss = (self.best + mx.log(self.total) - target_logit)[:, 0]
        dh = None
        if gradient:
            slope = self.shaping.slope(target_logit, self.arrays)
            chosen = self.chosen if slope is None else self.chosen * slope
            dh = self.weighted.result(matrix, products) / self.total - chosen
            self.arrays.settle(dh)
        self.arrays.settle(loss)
        return HeadResult(loss, self.predicted, dh)


@dataclass(frozen=True)
class HeadKernel:
    """Streams a head's rows, `chunk_rows` at a time; each chunk is at most one evaluation.

    `backward` computes the products of gradients, if not those of the matrices do.
    """

    matrices: Matrices
    chunk_rows: int
    backward: Products | None = None

    def run(
        self,
        hs: Sequence[mx.array],
        targets: Sequence[Targets],
        matrix: Matrix,
        gradient: bool,
        predictions: bool,
        moves: Sequence[Move | None] = (),
        shapings: Sequence[Shaping] = (),
    ) -> list[HeadResult]:
        """Losses of hidden states h (N, D) against targets (N,), in float32, for every lane.

        `moves` say how each lane moves the matrix, `shapings` what becomes of its products; without
        them none does, and they are the logits.
        """
        arrays = self.matrices.arrays
        moves = moves or [None] * len(hs)
        shapings = shapings or [Shaping()] * len(hs)
        lanes = [
            self._lane(h, of_lane, matrix, predictions, move, shaping)
            for h, of_lane, move, shaping in zip(hs, targets, moves, shapings, strict=True)
        ]
        for start in range(0, matrix.rows, self.chunk_rows):
            stop = min(matrix.rows, start + self.chunk_rows)
            for chunk, seeing in self.matrices.as_seen(matrix, start, stop, moves):
                for lane in seeing:
                    lanes[lane].add(chunk, start, gradient)
                del chunk
            arrays.finish([lane.state for lane in lanes])
        products = self.matrices.products
        results = [lane.result(gradient, matrix, products) for lane in lanes]
        arrays.finish([[result.loss, result.dh] for result in results])
        return results

    def _lane(
        self,
        h: mx.array,
        targets: Targets,
        matrix: Matrix,
        predictions: bool,
        move: Move | None,
        shaping: Shaping,
    ) -> _Lane:
        count = h.shape[0]
        arrays = self.matrices.arrays
        chosen = self.matrices.products.rounded(self.matrices.rows(matrix, targets, move))
        return _Lane(
            self.matrices.input(h, matrix),
            chosen,
            mx.full((count, 1), -mx.inf),
            mx.zeros((count, 1)),
            mx.zeros((count,), dtype=mx.int32) if predictions else None,
            arrays,
            RowSum(arrays),
            targets,
            shaping,
            self.backward,
        )
