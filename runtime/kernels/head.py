"""The head kernel: the loss, its gradient and the predictions without ever holding all logits.

One pass over the vocabulary in chunks of rows of W keeps a running maximum m, sum z and, for
training, G = sum_j exp(l_j - m) W_j, rescaled whenever m grows (as FlashAttention does over keys):

    loss = m + log z - l_target        d loss / d h = G / z - W_target

Each chunk is read and unpacked once. Positions without a target never get here. The reference is
`harness.reference.head`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ondevice.manifest import Matrix
from runtime.kernels.exponential import exp, row_sums
from runtime.kernels.linear import LinearKernel
from runtime.kernels.unpack import dense, join, split, unpack


@dataclass(frozen=True)
class HeadResult:
    """Per position: loss (N,), the most likely token (N,), and dh (N, D) of the summed loss.

    Predictions cost a pass over the logits and are made where no gradient is asked for.
    """

    loss: mx.array
    predicted: mx.array | None
    dh: mx.array | None


@dataclass(frozen=True)
class HeadKernel:
    """Streams a head's rows, `chunk_rows` at a time."""

    linear: LinearKernel
    chunk_rows: int

    def run(
        self, h: mx.array, targets: npt.NDArray[np.int64], matrix: Matrix, gradient: bool
    ) -> HeadResult:
        """Losses of hidden states h (N, D) against targets (N,), in float32."""
        count = h.shape[0]
        weights = self.linear.weights
        chosen = dense(weights.gather(matrix, targets), matrix.bits)
        target_logit = row_sums(h * chosen)
        best = mx.full((count, 1), -mx.inf)
        predicted = mx.zeros((count,), dtype=mx.int32)
        total = mx.zeros((count, 1))
        halves: tuple[mx.array, ...] = ()
        shifted: mx.array | None = None
        parts = split(h, matrix.bits)
        for start in range(0, matrix.rows, self.chunk_rows):
            stop = min(matrix.rows, start + self.chunk_rows)
            tile = weights.tile(matrix, start, stop)
            columns: tuple[mx.array, ...] = ()
            if self.linear.arithmetic == "packed":
                logits = self.linear.times_transposed(h, parts, tile, matrix)
            else:
                columns = unpack(tile, matrix.bits)
                logits = parts[0] @ columns[0].T
                for part, column in zip(parts[1:], columns[1:], strict=True):
                    logits = mx.addmm(logits, part, column.T)
                if tile.shift is not None:
                    sums = h.reshape(count, tile.shift.shape[1], -1).sum(axis=-1)
                    logits = mx.addmm(logits, sums, tile.shift.T)
            top = logits.max(axis=-1, keepdims=True)
            if not gradient:
                place = logits.argmax(axis=-1).astype(mx.int32) + start
                predicted = mx.where(top[:, 0] > best[:, 0], place, predicted)
            new = mx.maximum(best, top)
            fade = mx.exp(best - new)
            p = exp(logits - new)
            total = total * fade + row_sums(p)
            best = new
            del logits
            if gradient and self.linear.arithmetic == "packed":
                product = self.linear.times(p, tile, matrix)
                shifted = product if shifted is None else shifted * fade + product
                mx.eval(shifted)
            elif gradient:
                if halves:
                    halves = tuple(
                        mx.addmm(half * fade, p, c) for half, c in zip(halves, columns, strict=True)
                    )
                else:
                    halves = tuple(p @ c for c in columns)
                if tile.shift is not None:
                    moved = p @ tile.shift
                    shifted = moved if shifted is None else shifted * fade + moved
                    mx.eval(shifted)
                mx.eval(halves)
            mx.eval(best, total, predicted)
            del p, tile, columns, fade, new, top
        loss = (best + mx.log(total) - target_logit)[:, 0]
        if not gradient:
            return HeadResult(loss, predicted, None)
        if halves:
            dh = join(halves)
            if shifted is not None:
                dh = dh + mx.repeat(shifted, matrix.group_size, axis=1)
        else:
            assert shifted is not None
            dh = shifted
        return HeadResult(loss, None, dh / total - chosen)
