"""The reference for training all parameters: MeZO as published, with the whole model in memory."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from oracles.whole_model import plain_loss
from runtime.arrays.stored import Block, Matrix
from runtime.arrays.weight_source import FloatTile
from runtime.bundle.store import Bundle
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters
from runtime.methods.full.row_noise import RowNoise
from runtime.storage.weights import Weights

F32 = npt.NDArray[np.float32]
STORED = {  # how many bits of a float32's mantissa each type lacks
    "float32": (np.float32, 0),
    "float16": (np.float16, 13),
    "bfloat16": (ml_dtypes.bfloat16, 16),
}


class MemoryWeights:
    """A source of weights that are all in memory, float32; vectors have one row."""

    def __init__(self, bundle: Bundle, tensors: dict[str, F32]) -> None:
        self.tensors = tensors
        matrices = bundle.manifest.matrices
        self._shapes = {name: one.shape for name, one in bundle.manifest.vectors.items()}
        self._names = {matrix.packed.offset: name for name, matrix in matrices.items()}

    def vector(self, name: str) -> mx.array:
        return mx.array(self.tensors[name][0].reshape(self._shapes[name]))

    def tile(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        return FloatTile(mx.array(self.tensors[self._names[matrix.packed.offset]][start:stop]))

    def columns(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        tensor = self.tensors[self._names[matrix.packed.offset]]
        return FloatTile(mx.array(tensor[:, start:stop]))

    def gather(self, matrix: Matrix, rows: npt.NDArray[np.int64]) -> FloatTile:
        return FloatTile(mx.array(self.tensors[self._names[matrix.packed.offset]][rows]))

    def read_ahead(self, block: Block) -> None:
        """Nothing: everything is in memory."""

    def release(self, block: Block) -> None:
        """Nothing: everything stays in memory."""


def all_weights(bundle: Bundle) -> dict[str, F32]:
    """Every matrix (R, C) and vector (1, N) of a bundle in floating point, as float32."""
    weights, manifest = Weights(bundle), bundle.manifest
    arrays = {name: np.array(weights.vector(name)).reshape(1, -1) for name in manifest.vectors}
    for name, matrix in manifest.matrices.items():
        tile = weights.tile(matrix, 0, matrix.rows)
        assert isinstance(tile, FloatTile)
        arrays[name] = np.array(tile.values.astype(mx.float32))
    return arrays


class MonolithicFullMeZO:
    """MeZO's Algorithms 1 and 2 over all parameters, perturbed at once, then a whole forward.

    As in `tests.oracles.estimators.MonolithicMeZO` perturbed values are computed from theta, and
    the loss is that of the bundle's own kernels. Updated matrices are rounded up or down, as
    `noise` draws it, to the type in which the bundle stores them. Vectors have no weight decay.
    """

    def __init__(
        self, bundle: Bundle, noise: RowNoise, epsilon: float, queries: int, weight_decay: float
    ) -> None:
        self.bundle, self.theta = bundle, all_weights(bundle)
        self.noise, self.epsilon = noise, epsilon
        self.queries, self.weight_decay = queries, weight_decay

    def _noise(self, step: int, query: int, name: str) -> F32:
        z = np.empty_like(self.theta[name])
        self.noise.draw(step, query, name, 0, z)
        return z

    def perturbed(self, step: int, query: int, by: float) -> MemoryWeights:
        """theta + by z, all of it."""
        moved = {
            name: self._noise(step, query, name) * np.float32(by) + value
            for name, value in self.theta.items()
        }
        return MemoryWeights(self.bundle, moved)

    def step(
        self, model: Model, rows: Sequence[Sample], number: int, rate: float
    ) -> tuple[float, list[float]]:
        """Update theta; returns the mean of all losses, and the projected gradients.

        `model` gives the sizes of tiles; its weights are not read.
        """
        none = Adapters(self.bundle.manifest, {})
        losses: list[tuple[float, float]] = []
        for query in range(self.queries):
            pair = []
            for by in (self.epsilon, -self.epsilon):
                weights = self.perturbed(number, query, by)
                run = Model(self.bundle, weights, model.lowered, model.graphs)
                pair.append(plain_loss(run, none, rows))
            losses.append((pair[0], pair[1]))
        gradients = [(plus - minus) / (2 * self.epsilon) for plus, minus in losses]
        for name, value in self.theta.items():
            decays = name in self.bundle.manifest.matrices
            update = value * np.float32(self.weight_decay if decays else 0)
            for query, gradient in enumerate(gradients):
                update += self._noise(number, query, name) * np.float32(gradient / self.queries)
            self.theta[name] = self._rounded(number, name, value - update * np.float32(rate))
        return sum(map(sum, losses)) / (2 * len(losses)), gradients

    def _rounded(self, step: int, name: str, value: F32) -> F32:
        if name in self.bundle.manifest.vectors:
            return value
        dtype, dropped = STORED[self.bundle.manifest.matrices[name].packed.dtype]
        mask = np.uint32((1 << dropped) - 1)
        integers = self.noise.integers(step, name, np.arange(len(value)), value.shape[1])
        bits = (value.view(np.uint32) + (integers & mask)) & ~mask
        return bits.view(np.float32).astype(dtype).astype(np.float32)
