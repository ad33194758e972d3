"""The reference implementations: the dense model with autograd, MeZO as published, the kernels.

The dense model is mlx-lm's own class with the bundle's dequantized weights, and LoRA added by
mlx-lm's own `LoRALinear`; its gradients come from MLX's autograd over the whole graph. The kernels'
references materialize what the kernels avoid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from export.sources.families import build_model
from export.sources.source import Checkpoint
from ondevice.bundle.store import Bundle
from ondevice.operations.tensors import Matrix
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.methods.dropout import StepDropout
from runtime.methods.noise import Noise
from runtime.methods.protocol import Row as ScoredRow
from runtime.storage.weight_source import FloatTile, WeightSource
from runtime.storage.weights import Weights

Row = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # tokens (T+1,) and the scored positions (N,)


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


def dense_model(
    bundle: Bundle, adapters: Adapters | None = None, dropout: StepDropout | None = None
) -> nn.Module:
    """mlx-lm's model with the bundle's weights, and adapters where given.

    With `dropout` it is that of `batch_loss` in a training step.
    """
    manifest = bundle.manifest
    model = build_model(manifest.family, manifest.config)
    weights = Weights(bundle)
    values = {f"{name}.weight": dequantized(weights, m) for name, m in manifest.matrices.items()}
    values |= {name: weights.vector(name) for name in manifest.vectors}
    model.load_weights(list(values.items()), strict=True)
    return model if adapters is None else adapted(model, adapters, dropout)


def checkpoint_model(checkpoint: Checkpoint) -> nn.Module:
    """mlx-lm's model with the checkpoint's weights in float32."""
    model = build_model(checkpoint.family, checkpoint.config)
    weights = [
        (name, mx.array(checkpoint.rows(name, 0, checkpoint.shape(name)[0])))
        for name in checkpoint.names()
    ]
    model.load_weights(weights, strict=True)
    mx.eval(model.parameters())
    return model


class RowDropout(nn.Module):  # type: ignore[misc]
    """The dropout of one adapter's input, in place of mlx-lm's: one mask for each row."""

    def __init__(self, dropout: StepDropout, tensor: str) -> None:
        super().__init__()
        self._dropout, self._tensor = dropout, tensor
        self._row = 0

    def begin(self, row: int) -> None:
        """Take the mask of this row from now on."""
        self._row = row

    def __call__(self, x: mx.array) -> mx.array:
        _, tokens, columns = x.shape
        mask = self._dropout.of_tensor(self._tensor, self._row).mask(tokens, columns)
        return x * mask.kept.astype(x.dtype)[None] * mask.factor


def adapted(model: nn.Module, adapters: Adapters, dropout: StepDropout | None = None) -> nn.Module:
    """The model, frozen, with its linear layers replaced by mlx-lm's LoRA layers."""
    manifest = adapters.manifest
    model.freeze()
    parents = dict(model.named_modules())
    for block in manifest.layers:
        for name in manifest.adapted(block):
            path = block.tensor(name)
            lora = LoRALinear.from_base(parents[path], r=manifest.lora.rank, scale=adapters.scale)
            if dropout is not None:
                lora.dropout = RowDropout(dropout, path)
            parent, _, attribute = path.rpartition(".")
            setattr(parents[parent], attribute, lora)
    model.update(tree_unflatten(list(adapters.tensors.items())))
    mx.eval(model.parameters())
    return model


def batch_loss(model: nn.Module, rows: Sequence[Row]) -> mx.array:
    """Mean loss over all scored targets of all rows, each row run by itself.

    From the logits on it is float64 (CPU only): in float32 MLX sums a vocabulary of 262,144 with
    an error of 5e-5, which would be the reference's error and not ours.
    """
    total, count = mx.array(0.0, mx.float64), 0
    dropouts = [one for one in model.modules() if isinstance(one, RowDropout)]
    for row, (tokens, scored) in enumerate(rows):
        for dropout in dropouts:
            dropout.begin(row)
        ids = mx.array(np.asarray(tokens, np.int32))
        logits = model(ids[None, :-1])[0].astype(mx.float64)
        target = mx.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
        mask = np.zeros(len(tokens) - 1)
        mask[scored] = 1.0
        losses = mx.logsumexp(logits, axis=-1) - target
        total = total + (losses * mx.array(mask, mx.float64)).sum()
        count += len(scored)
    return total / count


def in_double(model: nn.Module) -> nn.Module:
    """The model with every parameter in float64, to measure the errors of float32 against."""
    model.update(tree_map(lambda value: value.astype(mx.float64), model.parameters()))
    return model


def gradients(model: nn.Module, rows: Sequence[Row]) -> tuple[float, dict[str, mx.array]]:
    """The loss and d loss / d adapter, by autograd over the dense model, on the CPU."""
    with mx.stream(mx.cpu):
        value, tree = nn.value_and_grad(model, lambda m: batch_loss(m, rows))(model)
        found: dict[str, mx.array] = dict(tree_flatten(tree))
        mx.eval(value, found)
    return float(value), found


def plain_loss(model: Model, adapters: Adapters, rows: Sequence[ScoredRow]) -> float:
    """Mean loss over all scored targets, each row run by itself from end to end."""
    total, count = 0.0, 0
    for row in rows:
        x = model.embed(row.inputs)
        for block in model.blocks[1:-1]:
            x = model.forward(block, x, adapters.loras(block))
        h = model.hidden(x, row.scored)
        (result,) = model.losses([h], [row.targets], gradient=False)
        total += float(result.loss.sum().item())  # type: ignore[arg-type]
        count += len(row.targets)
    return total / count


class MonolithicMeZO:
    """MeZO's Algorithms 1 and 2 as published: all parameters perturbed, then a whole forward.

    Two departures make exact comparison possible: theta + eps z and theta - eps z are computed
    from a copy of theta, where the paper restores theta by a third perturbation, which rounds; and
    the loss is that of the bundle's own kernels.
    """

    def __init__(
        self, adapters: Adapters, noise: Noise, epsilon: float, queries: int, weight_decay: float
    ) -> None:
        self.adapters = adapters
        self.noise, self.epsilon = noise, epsilon
        self.queries, self.weight_decay = queries, weight_decay

    def _perturbed(self, step: int, query: int, by: float) -> Adapters:
        theta = self.adapters.tensors
        z = {name: self.noise.draw(step, query, name, theta[name].shape) for name in theta}
        tensors = {name: theta[name] + z[name] * by for name in theta}
        return Adapters(self.adapters.manifest, tensors, self.adapters.dtype)

    def step(
        self, model: Model, rows: Sequence[ScoredRow], number: int, rate: float
    ) -> tuple[float, list[float]]:
        """Update the adapters; returns the mean of all losses, and the projected gradients."""
        losses: list[tuple[float, float]] = []
        for query in range(self.queries):
            plus = plain_loss(model, self._perturbed(number, query, self.epsilon), rows)
            minus = plain_loss(model, self._perturbed(number, query, -self.epsilon), rows)
            losses.append((plus, minus))
        gradients = [(plus - minus) / (2 * self.epsilon) for plus, minus in losses]
        for name, theta in self.adapters.tensors.items():
            update = theta * self.weight_decay
            for query, gradient in enumerate(gradients):
                z = self.noise.draw(number, query, name, theta.shape)
                update = update + z * (gradient / self.queries)
            self.adapters.tensors[name] = theta - update * rate
        mx.eval(self.adapters.tensors)
        return sum(map(sum, losses)) / (2 * len(losses)), gradients


def linear(
    x: mx.array, w: mx.array, bias: mx.array | None, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """y = x W^T + b + s (x A) B."""
    y = x @ w.T + scale * ((x @ a) @ b)
    return y if bias is None else y + bias


def token_bits(key: int, token: int, columns: int) -> npt.NDArray[np.uint16]:
    """The random bits (C,) that say what dropout drops of one token, by a key of its own."""
    last = ((key & 0xFFFFFFFF) + token) & 0xFFFFFFFF
    words = mx.random.split(mx.array([key >> 32, last], mx.uint32), math.ceil(columns / 4))
    return np.array(words).reshape(-1).view(np.uint16)[:columns]


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, window: int | None) -> mx.array:
    """softmax(q k^T scale + mask) v over all scores at once; (1, H, T, D), (1, K, T, D)."""
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    distance = mx.arange(length)[:, None] - mx.arange(length)[None]
    allowed = (distance >= 0) & (distance < (window or length))
    scores = mx.where(allowed, (q @ k.swapaxes(-1, -2)) * scale, -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


def head(h: mx.array, w: mx.array, targets: mx.array) -> mx.array:
    """Losses (N,) of h (N, D) through W (V, D), from all logits."""
    losses: mx.array = nn.losses.cross_entropy(h @ w.T, targets)
    return losses


def relative_error(found: mx.array, expected: mx.array) -> float:
    """|found - expected| / |expected| in the Euclidean norm; 0 where both are zero."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (found, expected))
    if expected.dtype == mx.float64:
        b = np.array(expected)
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size
