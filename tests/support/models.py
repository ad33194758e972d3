"""Models of tiny bundles for tests: adapters, rows, gradients, and how close they must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from oracles import whole_model as reference

from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients
from runtime.arrays.weight_source import WeightSource
from runtime.bundle.store import Bundle
from runtime.engine.graphs import Graphs
from runtime.engine.model import Model, Positions
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.methods.adapters import Adapters
from runtime.methods.mebp import Backprop, MeBP, StepDropout
from runtime.methods.protocol import StepLoss
from runtime.objectives.next_token import NextToken
from runtime.objectives.objective import Loss
from runtime.plan.lower import Sizes, lower
from runtime.plan.operation_order import backward_schedule
from runtime.storage.activations import Activations
from runtime.storage.weights import Weights

Rng = np.random.Generator
Tiny = Callable[..., Bundle]

FAMILIES = ("qwen2", "gemma3", "llama")
MIXERS = ("lfm2", "qwen3_5")  # with layers that see other tokens by other means than attention
# Gemma 3 has norms of queries and keys too, and is otherwise further from Qwen 2
_IN_TURN = [*FAMILIES, pytest.param("qwen3", marks=pytest.mark.slow)]
_SHARING = pytest.param("gemma4", marks=pytest.mark.slow)  # shared keys, and tables of layers
each_family = pytest.mark.parametrize("family", _IN_TURN)
each_with_mixers = pytest.mark.parametrize("family", [*_IN_TURN, *MIXERS, _SHARING])
BUCKETS = (16, 32, 64)
LENGTHS = (96, 128)  # two tiles of 48, two of 64
CLOSE = 1e-5
BATCH = (31, 20, 27)  # tokens of rows: at most 32 (a bucket), none fills it


def adapters_of(bundle: Bundle, rng: Rng, size: float = 0.05) -> Adapters:
    """Adapters whose B is not zero, so that every gradient depends on every tensor.

    size: the standard deviation of B.
    """
    adapters = Adapters.initial(bundle.manifest, int(rng.integers(1 << 30)))
    for name, value in adapters.tensors.items():
        if name.endswith("lora_b"):
            noise = rng.standard_normal(value.shape).astype(np.float32) * size
            adapters.tensors[name] = mx.array(noise)
    return adapters


def scored_logits(
    model: Model, adapters: Adapters, tokens: np.ndarray, scored: Positions
) -> np.ndarray:
    """(N, V) after the tokens at these positions, of the head's whole matrix."""
    x = model.embed(tokens, adapters.loras(model.blocks[0]))
    for block in model.blocks[1:-1]:
        x = model.forward(block, x, adapters.loras(block))
    w = reference.dequantized(model.weights, model.head_matrix)
    for lora in adapters.loras(model.blocks[-1]).values():
        w = w + lora.scale * (lora.a @ lora.b).T
    return np.array(model.hidden(x, scored) @ w.T)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The relative distance of two arrays of one shape, in the Euclidean norm."""
    assert found.shape == expected.shape
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected.astype(np.float64)))


def row_of(bundle: Bundle, rng: Rng, length: int) -> Row:
    """Random tokens with so many targets, of which random ones, at least one, are scored."""
    tokens = rng.integers(0, bundle.manifest.vocab_size, length + 1).astype(np.int32)
    return Row(tokens, scored_of(rng, length))


def scored_of(rng: Rng, length: int) -> Positions:
    """Random positions, at least one, up to all of them."""
    found = rng.choice(length, int(rng.integers(1, length + 1)), replace=False)
    return np.sort(found).astype(np.int64)


def rows_of(bundle: Bundle, rng: Rng, lengths: tuple[int, ...] = BATCH) -> list[Row]:
    return [row_of(bundle, rng, length) for length in lengths]


def packed_of(bundle: Bundle, rng: Rng, length: int, most: int) -> PackedRows:
    """Rows of 1 to `most` tokens that have `length` tokens together."""
    rows: list[Row] = []
    while length:
        rows.append(row_of(bundle, rng, min(int(rng.integers(1, most + 1)), length)))
        length -= len(rows[-1].inputs)
    return PackedRows(tuple(rows))


def mebp(
    model: Model,
    adapters: Adapters,
    rows: Sequence[Sample],
    folder: Path,
    kept: int | Sequence[int] = 0,
    dropout: StepDropout | None = None,
    loss: Loss | None = None,
    stores: bool = True,
) -> tuple[StepLoss, dict[str, mx.array]]:
    """One step's loss and its gradients by full name; of `loss`, or of the cross entropy.

    `kept` are so many of the last layers, which keep all, or how many keep how much.
    """
    manifest = model.bundle.manifest
    shape = (1, model.bucket, manifest.widest)
    scratch = Activations(folder, len(manifest.blocks), len(rows), shape)
    kept = [kept] * model.lowered.most_kept if isinstance(kept, int) else kept
    stored = storage_of(model, folder, len(rows)) if stores else None
    found: dict[str, mx.array] = {}

    def update(block: Any, gradients: Any) -> None:
        for name, pair in gradients.items():
            names = manifest.adapter_names(block, name)
            assert names[0] not in found
            found.update(zip(names, pair, strict=True))

    loss = loss or NextToken()
    backprop = Backprop(model, adapters, scratch, 1, kept, dropout or StepDropout(), loss, stored)
    result = backprop.gradients(rows, loss.count(rows), update)
    assert result.scored_tokens == sum(len(row.targets) for row in rows)
    return result, found


def mebp_of(
    model: Model, adapters: Adapters, optimizer: Any, folder: Path, rows: int, **more: Any
) -> MeBP:
    """The method on a model, for steps whose parts have at most so many rows."""
    shape = (1, model.bucket, model.bundle.manifest.widest)
    scratch = Activations(folder, len(model.blocks), rows, shape)
    return MeBP(lambda length: model, adapters, scratch, optimizer, **more)


def storage_of(model: Model, folder: Path, rows: int) -> Activations | None:
    """The file for the few values of layers that keep no others, where there are any."""
    lowered, manifest = model.lowered, model.bundle.manifest
    slots = lowered.stored_values * len(lowered.layers)
    shape = (1, model.bucket, manifest.widest)
    return Activations(folder, slots, rows, shape) if slots else None


@dataclass
class Kept:
    """An optimizer that only keeps the gradients that it is handed."""

    found: dict[str, mx.array] = field(default_factory=dict)

    def begin(self, number: int, rate: float) -> None:
        pass

    def apply(self, block: Block, gradients: Gradients) -> None:
        for name, (da, db) in gradients.items():
            assert f"{block.tensor(name)}.lora_a" not in self.found
            self.found[f"{block.tensor(name)}.lora_a"] = da
            self.found[f"{block.tensor(name)}.lora_b"] = db


def agree(found: dict[str, mx.array], expected: dict[str, mx.array], bound: float = CLOSE) -> None:
    """Relative errors within the bound."""
    errors = errors_of(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= bound, (worst, errors[worst])


def errors_of(found: dict[str, mx.array], expected: dict[str, mx.array]) -> dict[str, float]:
    """The relative error of each gradient.

    A query that sees one key has no gradient: there it is the size of what rounding left.
    """
    assert set(found) == set(expected)
    return {
        name: reference.relative_error(found[name], value)
        if value.any()
        else float(np.linalg.norm(np.array(found[name].astype(mx.float32))))
        for name, value in expected.items()
    }


def check_gradients(
    dense: nn.Module,
    model: Model,
    adapters: Adapters,
    samples: Sequence[Sample],
    folder: Path,
    kept: int = 0,
    bound: float = CLOSE,
) -> dict[str, mx.array]:
    """MeBP's loss and gradients are autograd's over the dense model; returns the gradients."""
    result, found = mebp(model, adapters, samples, folder, kept)
    rows = [(row.tokens, row.scored) for sample in samples for row in sample.rows]
    loss, expected = reference.gradients(dense, rows)
    assert result.loss_sum / result.scored_tokens == pytest.approx(loss, rel=bound)
    agree(found, expected, bound)
    return found


def with_input_gradients(model: Model) -> Model:
    """The model whose first layer too returns the gradient of its input, which no adapter needs."""
    assert not model.lowered.slice_columns
    embedding, first, *others = model.lowered.blocks
    changed = replace(first, backward=backward_schedule(first.program, first.adapted, True))
    return replace(model, lowered=replace(model.lowered, blocks=(embedding, changed, *others)))


def model_of(
    bundle: Bundle,
    bucket: int,
    arithmetic: str = "unpacked",
    tile_values: int = 20_000,
    attention_block: int = 13,
    chunk_rows: int = 200,
    slices: bool = False,
    weights: WeightSource | None = None,
    compute_dtype: str = "float32",
    compiled: bool = False,
) -> Model:
    """A model whose tiles are small and divide nothing; its weights are the bundle's by default."""
    sizes = Sizes(tile_values, attention_block, 0, slices, chunk_rows)
    packed = arithmetic == "packed"
    lowered = lower(bundle.manifest, bucket, sizes, packed, 0, compute_dtype, compiled)
    mapped = Weights(bundle) if compiled else None
    return Model(bundle, weights or Weights(bundle), lowered, Graphs(bundle), mapped=mapped)
