"""Whole models in memory, which offloading is compared with: mlx-lm's own, and MeZO as published.

MeZO's Algorithm 1 (arXiv 2305.17333): theta is perturbed in place by +eps z, -2 eps z and +eps z,
with a whole forward pass after each of the first two, and then updated. So the noise of all
parameters is drawn four times a step. The weights are float32, whatever type the bundle stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from export.sources.families import build_model
from runtime.arrays.stored import Block, Matrix
from runtime.arrays.weight_source import FloatTile, WeightSource
from runtime.bundle.store import Bundle
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.protocol import StepLoss
from runtime.storage.weights import Weights

F32 = npt.NDArray[np.float32]
TILE_VALUES = 1 << 19  # of a matrix that are perturbed at once


def dequantized(weights: WeightSource, matrix: Matrix) -> mx.array:
    """W (R, C) float32, by `mx.dequantize` if it is quantized."""
    tile = weights.tile(matrix, 0, matrix.rows)
    if isinstance(tile, FloatTile):
        return tile.values.astype(mx.float32)
    return mx.dequantize(
        tile.words,
        tile.scales,
        tile.biases(matrix.bits),
        group_size=matrix.group_size,
        bits=matrix.bits,
    )


def dense_model(bundle: Bundle) -> nn.Module:
    """mlx-lm's model with the bundle's weights, float32."""
    manifest = bundle.manifest
    model = build_model(manifest.family, manifest.config)
    weights = Weights(bundle)
    values = {f"{name}.weight": dequantized(weights, m) for name, m in manifest.matrices.items()}
    values |= {name: weights.vector(name) for name in manifest.vectors}
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    stacked = [
        (name, value.reshape(shapes.get(name, value.shape))) for name, value in values.items()
    ]
    model.load_weights(stacked, strict=True)
    return model


def plain_loss(model: Model, adapters: Adapters, rows: Sequence[Sample]) -> float:
    """Mean loss over all scored targets, each sample run by itself from end to end."""
    total, count = 0.0, 0
    for row in rows:
        x = model.embed(row.inputs, adapters.loras(model.blocks[0]), row.offsets)
        for block in model.blocks[1:-1]:
            x = model.forward(block, x, adapters.loras(block), row.offsets)
        h = model.hidden(x, row.scored)
        loras = [adapters.loras(model.blocks[-1])]
        (result,) = model.losses([h], [row.targets], gradient=False, loras=loras)
        total += float(result.loss.sum().item())  # type: ignore[arg-type]
        count += len(row.targets)
    return total / count


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


class InMemoryMeZO:
    """One direction a step; the kernels and the noise are those of the block-wise method."""

    def __init__(
        self,
        weights: MemoryWeights,
        models: Callable[[int], Model],
        adapters: Adapters,
        noise: RowNoise,
        epsilon: float,
    ) -> None:
        self.weights, self.models, self.adapters = weights, models, adapters
        self.noise, self.epsilon = noise, epsilon

    def step(self, number: int, rate: float, rows: Sequence[Sample]) -> StepLoss:
        """Update the weights; returns the summed loss at both points over twice the tokens."""
        model = self.models(max(len(row.inputs) for row in rows))
        self._move(number, self.epsilon)
        plus = plain_loss(model, self.adapters, rows)
        self._move(number, -2 * self.epsilon)
        minus = plain_loss(model, self.adapters, rows)
        self._move(number, self.epsilon)
        self._move(number, -rate * (plus - minus) / (2 * self.epsilon))
        tokens = sum(len(row.targets) for row in rows)
        return StepLoss((plus + minus) / 2 * tokens, 0, tokens)

    def _move(self, number: int, by: float) -> None:
        """theta + by z, in place."""
        for name, value in self.weights.tensors.items():
            height = max(1, TILE_VALUES // value.shape[1])
            for start in range(0, len(value), height):
                part = value[start : start + height]
                z = np.empty_like(part)
                self.noise.draw(number, 0, name, start, z)
                z *= np.float32(by)
                part += z
