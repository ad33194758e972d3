"""How far two heads' next-token distributions are apart, without ever holding all logits.

For logits p of the source and q of the model, one pass over chunks of the vocabulary keeps the
maximum m and the sum z of exp(. - m) of both, and a = sum_j exp(p_j - m_p) (p_j - q_j). Then

    KL(source || model) = a / z_p - (m_p + log z_p) + (m_q + log z_q)

The reference is in `tests/runtime/engine/test_divergence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet, view
from runtime.arrays.values import Loras
from runtime.engine.model import Model

HEAD_VALUES = 1 << 20  # logits of a row, and values of a tile, at a time
F64 = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Divergence:
    """For each of N positions: KL(source || model), and the losses of both, in nats."""

    divergence: F64
    source_loss: F64
    loss: F64


class _Distribution:
    """The running maximum, sum and target logit of the logits of N positions."""

    def __init__(self, targets: npt.NDArray[np.int64]) -> None:
        self.targets = targets
        self.most = np.full(len(targets), -np.inf)
        self.total = np.zeros(len(targets))
        self.chosen = np.zeros(len(targets))

    def add(self, logits: Logits, start: int) -> tuple[Logits, F64]:
        """Add a chunk (N, V'); returns exp(logits - maximum), and the factor of earlier sums."""
        inside = (self.targets >= start) & (self.targets < start + logits.shape[1])
        self.chosen[inside] = logits[inside, self.targets[inside] - start]
        most = np.maximum(self.most, logits.max(axis=1))
        fade = np.exp(self.most - most)
        weights = np.exp(logits - most[:, None].astype(np.float32))
        self.total = self.total * fade + weights.sum(axis=1, dtype=np.float64)
        self.most = most
        return weights, fade

    @property
    def log_sum(self) -> F64:
        log_sum: F64 = self.most + np.log(self.total)
        return log_sum

    @property
    def loss(self) -> F64:
        loss: F64 = self.log_sum - self.chosen
        return loss


class _Head:
    """The logits of several rows' hidden states h (N, D), a chunk of the vocabulary at a time."""

    def __init__(self, model: Model, hs: Sequence[mx.array], loras: Loras) -> None:
        self.matrix, self.matrices = model.head_matrix, model.matrices
        self.rows, self.shaping = model.lowered.execution.chunk_rows, model.shaping(loras)
        self.inputs = [self.matrices.input(h) for h in hs]
        self.through_a = [self.shaping.through_a(h, self.matrices.arrays) for h in hs]

    def logits(self, start: int, stop: int) -> Iterator[Logits]:
        """The logits (N, stop - start) of each row."""
        tile = self.matrices.tile(self.matrix, start, stop)
        for given, through_a in zip(self.inputs, self.through_a, strict=True):
            products = tile.transposed_product(given)
            logits = self.shaping.of_tile(products, start, self.matrices.arrays, through_a)
            mx.eval(logits)
            yield view(logits)


class _Pair:
    """The running sums of one row."""

    def __init__(self, targets: npt.NDArray[np.int64]) -> None:
        self.source, self.model = _Distribution(targets), _Distribution(targets)
        self.apart = np.zeros(len(targets))

    @quiet
    def add(self, source: Logits, model: Logits, start: int) -> None:
        weights, fade = self.source.add(source, start)
        self.model.add(model, start)
        difference = np.subtract(source, model)
        self.apart = self.apart * fade + np.einsum("nv,nv->n", weights, difference)

    @quiet
    def result(self) -> Divergence:
        apart = self.apart / self.source.total - self.source.log_sum + self.model.log_sum
        return Divergence(apart, self.source.loss, self.model.loss)


def compare_heads(
    source: Model,
    model: Model,
    source_hs: Sequence[mx.array],
    hs: Sequence[mx.array],
    targets: Sequence[npt.NDArray[np.int64]],
    loras: tuple[Loras, Loras] = ({}, {}),
) -> list[Divergence]:
    """Compare the distributions that follow hidden states h (N, D) of two models, for every row.

    Both heads are read once, in chunks of rows; `loras` are their adapters.
    """
    first, second = _Head(source, source_hs, loras[0]), _Head(model, hs, loras[1])
    tokens = max(len(row_targets) for row_targets in targets)
    most = max(1, min(HEAD_VALUES // tokens, HEAD_VALUES // hs[0].shape[1]))
    step = min(first.rows, second.rows, most)
    pairs = [_Pair(row_targets) for row_targets in targets]
    vocabulary = first.matrix.rows
    for start in range(0, vocabulary, step):
        stop = min(vocabulary, start + step)
        both = zip(first.logits(start, stop), second.logits(start, stop), strict=True)
        for pair, (ours, theirs) in zip(pairs, both, strict=True):
            pair.add(ours, theirs, start)
            del ours, theirs
    return [pair.result() for pair in pairs]
