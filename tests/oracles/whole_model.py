"""The reference implementations: the dense model with autograd, MeZO as published, the kernels.

The dense model is mlx-lm's own class with the bundle's dequantized weights, and LoRA added by
mlx-lm's own `LoRALinear`; its gradients come from MLX's autograd over the whole graph. The kernels'
references materialize what the kernels avoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from export.sources.families import build_model
from export.sources.model_classes import model_module
from export.sources.source import Checkpoint
from harness.peers import in_memory
from harness.peers.in_memory import dequantized as dequantized
from oracles import double
from runtime.bundle.store import Bundle
from runtime.engine.model import Model
from runtime.engine.sample import PackedRows, Sample
from runtime.methods.adapters import Adapters
from runtime.methods.mebp import StepDropout

Row = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # tokens (T+1,) and the scored positions (N,)
States = Sequence[Sequence[mx.array]]  # for each row the inputs (1, T, D) of each layer


def dense_model(
    bundle: Bundle, adapters: Adapters | None = None, dropout: StepDropout | None = None
) -> nn.Module:
    """mlx-lm's model with the bundle's weights, and adapters where given.

    With `dropout` it is that of `batch_loss` in a training step.
    """
    model = in_memory.dense_model(bundle)
    return model if adapters is None else adapted(model, adapters, dropout)


def plain_loss(model: Model, adapters: Adapters, rows: Sequence[Sample]) -> float:
    """Mean loss over all scored targets, each sample run by itself from end to end."""
    total, count = 0.0, 0
    for row in rows:
        h = model.hidden(hidden_states(model, adapters, row)[-1], row.scored)
        loras = [adapters.loras(model.blocks[-1])]
        (result,) = model.losses([h], [row.targets], gradient=False, loras=loras)
        total += float(result.loss.sum().item())  # type: ignore[arg-type]
        count += len(row.targets)
    return total / count


def hidden_states(model: Model, adapters: Adapters, row: Sample) -> list[mx.array]:
    """The inputs (1, T, D) of every layer and of the head, from end to end of a sample."""
    states = [model.embed(row.inputs, adapters.loras(model.blocks[0]), row.offsets)]
    for block in model.blocks[1:-1]:
        states.append(model.forward(block, states[-1], adapters.loras(block), row.offsets))
    return states


@contextmanager
def from_states(model: nn.Module, layers: Sequence[str], states: States) -> Iterator[list[float]]:
    """Let a model in float64 compute, and be differentiated, at the inputs that an engine had.

    Every layer takes the input that `states` has for the row that is run, and gradients pass to the
    layer before. So gradients are compared at one point: a model has others at inputs that rounding
    has moved. The list gets the relative error of each input, from the one before on, in the
    columns that differ.
    """
    modules = dict(model.named_modules())
    rows = {id(modules[name]): iter([row[at] for row in states]) for at, name in enumerate(layers)}
    errors: list[float] = []

    def at_states(plain: Any, layer: nn.Module, *given: Any, **named: Any) -> Any:
        x, *rest = given or [named.pop(next(iter(named)))]
        state = double.widened(next(rows[id(layer)])[:, : x.shape[1]])
        moved = mx.stop_gradient(state - x)
        differ = (moved != 0).any(axis=(0, 1))  # not Gemma 4's numbers of tokens, which are large
        errors.append(relative_error(state * differ, mx.stop_gradient(x) * differ))
        return plain(layer, x + moved, *rest, **named)

    calls = {type(modules[name]): type(modules[name]).__call__ for name in layers}
    with ExitStack() as stack:
        for kind, plain in calls.items():
            replaced = partialmethod(partial(at_states, plain))
            stack.enter_context(mock.patch.object(kind, "__call__", replaced))
        yield errors


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
        self._row, self._first = 0, 0

    def begin(self, row: int, first: int = 0) -> None:
        """Take the mask of this row from now on, from its token `first` on."""
        self._row, self._first = row, first

    def __call__(self, x: mx.array) -> mx.array:
        _, tokens, columns = x.shape
        dropout = self._dropout.of_tensor(self._tensor, self._row).after(self._first)
        mask = dropout.mask(tokens, columns)
        return x * mask.remaining.astype(x.dtype)[None] * mask.factor


def adapted(model: nn.Module, adapters: Adapters, dropout: StepDropout | None = None) -> nn.Module:
    """The model, frozen, with its linear layers replaced by mlx-lm's LoRA layers."""
    manifest = adapters.manifest
    model.freeze()
    parents = dict(model.named_modules())
    for block in manifest.blocks:
        for name in manifest.adapted(block):
            path = block.tensor(name)
            kind = LoRAEmbedding if block == manifest.blocks[0] else LoRALinear
            lora = kind.from_base(parents[path], r=manifest.lora.rank, scale=adapters.scale)
            if dropout is not None:
                lora.dropout = RowDropout(dropout, path)
            parent, _, attribute = path.rpartition(".")
            setattr(parents[parent], attribute, lora)
    model.update(tree_unflatten(list(adapters.tensors.items())))
    mx.eval(model.parameters())
    return model


def batch_loss(
    model: nn.Module, rows: Sequence[Row], places: Sequence[tuple[int, int]] | None = None
) -> mx.array:
    """Mean loss over all scored targets of all rows, each row run by itself.

    `places` says, for dropout, where each row stands in the step: the number of its sequence, and
    its first token there. Without it every row is a sequence of its own.

    From the logits on it is float64 (CPU only): in float32 MLX sums a vocabulary of 262,144 with
    an error of 5e-5, which would be the reference's error and not ours.
    """
    total, count = mx.array(0.0, mx.float64), 0
    dropouts = [one for one in model.modules() if isinstance(one, RowDropout)]
    at = places or [(number, 0) for number in range(len(rows))]
    for (tokens, scored), place in zip(rows, at, strict=True):
        for dropout in dropouts:
            dropout.begin(*place)
        ids = mx.array(np.asarray(tokens, np.int32))
        mask = np.zeros(len(tokens) - 1)
        mask[scored] = 1.0
        total = total + _loss_sum(model(ids[None, :-1])[0], ids[1:], mask)
        count += len(scored)
    return total / count


def _loss_sum(logits: mx.array, targets: mx.array, mask: npt.NDArray[np.float64]) -> mx.array:
    """The summed loss of logits (T, V) against targets (T,), weighed by a mask (T,), in float64."""
    logits = logits.astype(mx.float64)
    target = mx.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return ((mx.logsumexp(logits, axis=-1) - target) * mx.array(mask, mx.float64)).sum()


@contextmanager
def row_masks(family: str, numbers: mx.array) -> Iterator[None]:
    """Make mlx-lm's models of a family attend by an explicit mask over packed rows.

    `numbers` (T,) has the number of each token's row. The mask is block-diagonal and causal; where
    a layer has a window, it is that of distances in the whole sequence. Positions are those of the
    whole sequence, too.
    """
    module: Any = model_module(family)

    def masked(h: mx.array, cache: object = None, window_size: int | None = None) -> mx.array:
        distance = mx.arange(h.shape[1])[:, None] - mx.arange(h.shape[1])[None]
        near = (distance >= 0) & (distance < (window_size or h.shape[1]))
        return near & (numbers[:, None] == numbers[None])

    plain = module.create_attention_mask
    module.create_attention_mask = masked
    try:
        yield
    finally:
        module.create_attention_mask = plain


def packed_gradients(model: nn.Module, packed: PackedRows) -> tuple[float, dict[str, mx.array]]:
    """As `gradients`, of packed rows in one sequence, by an explicit mask over all scores."""
    ids: list[int] = []
    targets: list[int] = []
    numbers: list[int] = []
    mask: list[float] = []
    for number, row in enumerate(packed.rows):
        tokens, scored = row.tokens.tolist(), set(row.scored.tolist())
        ids += tokens[:-1]
        targets += tokens[1:]
        numbers += [number] * (len(tokens) - 1)
        mask += [float(at in scored) for at in range(len(tokens) - 1)]

    def loss(model: nn.Module) -> mx.array:
        logits = model(mx.array(ids)[None])[0]
        return _loss_sum(logits, mx.array(targets), np.array(mask)) / sum(mask)

    with mx.stream(mx.cpu), row_masks(model.model_type, mx.array(numbers)):
        value, tree = nn.value_and_grad(model, loss)(model)
        found: dict[str, mx.array] = dict(tree_flatten(tree))
        mx.eval(value, found)
    return float(value), found


def in_double(model: nn.Module) -> nn.Module:
    """The model with every parameter in float64, to measure the errors of float32 against.

    MLX rounds some functions of them as in float32, but not inside of `double.computing`.
    """
    model.update(tree_map(lambda value: value.astype(mx.float64), model.parameters()))
    return model


def gradients(
    model: nn.Module, rows: Sequence[Row], places: Sequence[tuple[int, int]] | None = None
) -> tuple[float, dict[str, mx.array]]:
    """`batch_loss` and d loss / d adapter, by autograd over the dense model, on the CPU.

    They are computed in float64 if the model is `in_double`.
    """
    wide = any(value.dtype == mx.float64 for _, value in tree_flatten(model.parameters()))
    with double.computing() if wide else mx.stream(mx.cpu):
        value, tree = nn.value_and_grad(model, lambda m: batch_loss(m, rows, places))(model)
        found: dict[str, mx.array] = dict(tree_flatten(tree))
        mx.eval(value, found)
    return float(value), found


def linear(
    x: mx.array, w: mx.array, bias: mx.array | None, a: mx.array, b: mx.array, scale: float
) -> mx.array:
    """y = x W^T + b + s (x A) B."""
    y = x @ w.T + scale * ((x @ a) @ b)
    return y if bias is None else y + bias


def token_bits(key: int, token: int, columns: int) -> npt.NDArray[np.uint16]:
    """The random bits (C,) that say what dropout drops of one token, by a key for 32 columns."""
    last = ((key & 0xFFFFFFFF) + token) & 0xFFFFFFFF
    drawn = []
    for block in range(math.ceil(columns / 32)):
        first = ((key >> 32) + block) & 0xFFFFFFFF
        words = mx.random.split(mx.array([first, last], mx.uint32), 8)
        drawn.append(np.array(words).reshape(-1).view(np.uint16))
    return np.concatenate(drawn)[:columns]


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None,
    numbers: mx.array | None = None,
    cap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T scale + mask) v over all scores at once; (1, H, T, D), (1, K, T, D).

    With `cap` the scores are cap tanh(scores / cap) before the mask. `numbers` (T,) has the number
    of each token's row, in a sequence of packed rows. `sinks` (H,) are scores without values.
    """
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    distance = mx.arange(length)[:, None] - mx.arange(length)[None]
    allowed = (distance >= 0) & (distance < (window or length))
    if numbers is not None:
        allowed = allowed & (numbers[:, None] == numbers[None])
    scores = (q @ k.swapaxes(-1, -2)) * scale
    scores = scores if cap is None else cap * mx.tanh(scores / cap)
    scores = mx.where(allowed, scores, -mx.inf)
    if sinks is not None:
        further = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, further], axis=-1)
    return mx.softmax(scores, axis=-1)[..., :length] @ v


def convolution(
    x: mx.array, w: mx.array, bias: mx.array | None, numbers: mx.array | None = None
) -> mx.array:
    """y (T, C) of x (T, C), by a matrix (T, T) for each channel of the filters w (C, width, 1).

    `numbers` (T,) has the number of each token's row, in a sequence of packed rows.
    """
    back = mx.arange(len(x))[:, None] - mx.arange(len(x))[None]
    width = w.shape[1]
    allowed = (back >= 0) & (back < width)
    if numbers is not None:
        allowed = allowed & (numbers[:, None] == numbers[None])
    factors = mx.take(w[:, :, 0], mx.clip(width - 1 - back, 0, width - 1).reshape(-1), axis=1)
    matrices = mx.where(allowed, factors.reshape(-1, *back.shape), 0)  # (C, T, T)
    y = (matrices @ x.T[:, :, None])[..., 0].T
    return y if bias is None else y + bias


def head(
    h: mx.array,
    w: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    cap: float | None = None,
) -> mx.array:
    """Losses (N,) of h (N, D) through W (V, D), from all logits, with a bias (V,) and a cap."""
    logits = h @ w.T if bias is None else h @ w.T + bias
    logits = logits if cap is None else cap * mx.tanh(logits / cap)
    losses: mx.array = nn.losses.cross_entropy(logits, targets)
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
