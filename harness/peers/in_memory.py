"""mlx-lm's own model with a bundle's weights, all in memory, float32."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from export.sources.families import build_model
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import FloatTile, WeightSource
from runtime.bundle.store import Bundle
from runtime.storage.weights import Weights


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
