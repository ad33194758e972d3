"""The head kernel: the loss, its gradient and the predictions without ever holding all logits.

One pass over the vocabulary in chunks of rows of W keeps a running maximum m, sum z and, for
training, G = sum_j exp(l_j - m) W_j, rescaled whenever m grows (as FlashAttention does over keys):

    loss = m + log z - l_target        d loss / d h = G / z - W_target

Where logits are capped, l = c tanh(h W^T / c), row j of W counts 1 - (l_j / c)^2 times in G.

LoRA, with A (D, r) and B (r, V), adds s (h A) B to h W^T. Columns of B are summed as rows of W are,
R = sum_j exp(l_j - m) B_j, and dh has s (R / z - B_target) A^T besides. Its own gradients take a
second pass, since they need p = exp(l - m) / z, and the slope w that a position's loss has in the
objective. With g_j = w (p_j - [j is the target]), times the slope of a cap,

    dA = s h^T (g B^T)    dB = s (h A)^T g

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
from runtime.arrays.tile_products import Input, ReadyTile, RowSum
from runtime.arrays.values import Lora, Move
from runtime.operations.logits_kernel import Shaping

Targets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeadResult:
    """Per position: loss (N,), the most likely token (N,), and dh (N, D) of the summed loss.

    `log_sum` (N, 1) is the logarithm of the sum of e to all logits. Predictions cost a pass over
    the logits, and are computed only on request.
    """

    loss: mx.array
    log_sum: mx.array
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
    through_a: mx.array | None  # s h A (N, r)
    backward: Products | None
    adapted: mx.array | None = None  # R (N, r)

    def add(
        self, chunk: ReadyTile, rows: slice, gradient: bool, memory: list[mx.array] | None
    ) -> None:
        """Add the logits of a chunk, some rows of the vocabulary.

        If a list is given, they lie in the array that the call before has left there, and are left
        there for the next.
        """
        start, shape = rows.start, (len(self.targets), rows.stop - rows.start)
        to = memory.pop() if memory else None
        to = to if to is not None and to.shape == shape else None
        products = chunk.transposed_product(self.given, to=to)
        del to
        logits = self.shaping.of_tile(products, start, self.arrays, self.through_a)
        del products
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
            self.weighted.add(Input.of(p, chunk.products), chunk, fade)
            if self.shaping.lora is not None:
                columns = self.shaping.lora.b[:, start : start + p.shape[1]]
                part = p @ columns.T
                self.adapted = part if self.adapted is None else self.adapted * fade + part
                self.arrays.settle(self.adapted)
        self.arrays.settle(self.best, self.total)
        if memory is not None and self.shaping.is_plain:
            memory.append(p)

    @property
    def state(self) -> list[mx.array]:
        """The arrays that go on from chunk to chunk."""
        state = [self.best, self.total, *self.weighted.parts]
        state += [] if self.adapted is None else [self.adapted]
        return state if self.predicted is None else [*state, self.predicted]

    def result(self, gradient: bool, products: Products, matrix: Matrix) -> HeadResult:
        scores = row_sums(products.rounded(self.given.x, matrix) * self.chosen)[:, 0]
        lora, columns = self.shaping.lora, mx.zeros(0)
        if lora is not None and self.through_a is not None:
            columns = self.shaping.columns(self.targets).T  # (N, r)
            scores = scores + row_sums(self.through_a * columns)[:, 0]
        target_logit = self.shaping.of_rows(scores, self.targets, self.arrays)[:, None]
        log_sum = self.best + mx.log(self.total)
        loss = (log_sum - target_logit)[:, 0]
        dh = None
        if gradient:
            slope = self.shaping.slope(target_logit, self.arrays)
            chosen = self.chosen if slope is None else self.chosen * slope
            dh = self.weighted.result() / self.total - chosen
            if lora is not None and self.adapted is not None:
                own = self.adapted / self.total - (columns if slope is None else columns * slope)
                dh = mx.addmm(dh, own * lora.scale, lora.a.T)
            self.arrays.settle(dh)
        self.arrays.settle(loss, log_sum)
        return HeadResult(loss, log_sum, self.predicted, dh)


@dataclass
class _Adapted:
    """One set of positions in the second pass, and the sum of g B^T (N, r) so far."""

    given: Input
    through_a: mx.array
    shaping: Shaping
    targets: Targets
    slopes: mx.array  # (N, 1)
    log_sum: mx.array
    arrays: Arrays
    total: mx.array

    def add(self, chunk: ReadyTile, start: int, lora: Lora, db: mx.array) -> None:
        """Add a chunk of the vocabulary to the sum, and to its columns of dB (r, V)."""
        arrays, products = self.arrays, chunk.transposed_product(self.given)
        logits = self.shaping.of_tile(products, start, arrays, self.through_a)
        del products
        arrays.settle(logits)
        slope, shape = self.shaping.slope(logits, arrays), logits.shape
        g = arrays.exp_below(logits, self.log_sum).reshape(-1)
        del logits
        arrays.settle(g)
        here = np.flatnonzero((self.targets >= start) & (self.targets < start + shape[1]))
        places = here * shape[1] + self.targets[here] - start
        arrays.add_rows(g, places, mx.full(len(here), -1.0))
        g = arrays.times(g.reshape(shape), self.slopes)
        g = g if slope is None else arrays.times(g, slope)
        columns = slice(start, start + shape[1])
        self.total = self.total + g @ lora.b[:, columns].T
        arrays.settle(self.total)
        arrays.add_to(db, (slice(None), columns), self.through_a.T @ g)


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
        arrays, products = self.matrices.arrays, self.matrices.products
        moves = moves or [None] * len(hs)
        shapings = shapings or [Shaping()] * len(hs)
        lanes = [
            _Lane(
                self.matrices.input(h),
                products.rounded(self.matrices.rows(matrix, of_lane, move), matrix),
                mx.full((len(h), 1), -mx.inf),
                mx.zeros((len(h), 1)),
                mx.zeros((len(h),), dtype=mx.int32) if predictions else None,
                arrays,
                RowSum(arrays),
                of_lane,
                shaping,
                shaping.through_a(h, arrays),
                self.backward,
            )
            for h, of_lane, move, shaping in zip(hs, targets, moves, shapings, strict=True)
        ]
        memory = None if self.matrices.team is None or matrix.is_float else list[mx.array]()
        for start in range(0, matrix.rows, self.chunk_rows):
            stop = min(matrix.rows, start + self.chunk_rows)
            for chunk, seeing in self.matrices.as_seen(matrix, start, stop, moves):
                for lane in seeing:
                    lanes[lane].add(chunk, slice(start, stop), gradient, memory)
                del chunk
            arrays.finish([lane.state for lane in lanes])
        del memory
        results = [lane.result(gradient, products, matrix) for lane in lanes]
        arrays.finish([[result.loss, result.dh] for result in results])
        return results

    def adapter_gradients(
        self,
        hs: Sequence[mx.array],
        targets: Sequence[Targets],
        slopes: Sequence[mx.array],
        log_sums: Sequence[mx.array],
        matrix: Matrix,
        shaping: Shaping,
        gradients: tuple[mx.array, mx.array],
    ) -> None:
        """Add to `gradients`, of A (D, r) and B (r, V), those of positions of every lane, in place.

        `slopes` (N, 1) are those of the objective over the positions' losses.
        """
        arrays, lora = self.matrices.arrays, shaping.lora
        assert lora is not None, "the head has no adapter"
        da, db = gradients
        lanes = []
        for h, of_lane, slope, log_sum in zip(hs, targets, slopes, log_sums, strict=True):
            through_a = shaping.through_a(h, arrays)
            assert through_a is not None
            given, none = self.matrices.input(h), mx.zeros(through_a.shape)
            lanes.append(_Adapted(given, through_a, shaping, of_lane, slope, log_sum, arrays, none))
        for start in range(0, matrix.rows, self.chunk_rows):
            chunk = self.matrices.tile(matrix, start, min(matrix.rows, start + self.chunk_rows))
            for lane in lanes:
                lane.add(chunk, start, lora, db)
            del chunk
            arrays.finish(db, [lane.total for lane in lanes])
        for h, lane in zip(hs, lanes, strict=True):  # not h^T: see LoraProducts.backward_a
            arrays.add_to(da, ..., ((lane.total.T @ h) * lora.scale).T)
        arrays.finish(da)
