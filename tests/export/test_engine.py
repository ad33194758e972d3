"""Passes over a checkpoint's blocks for an export, against mlx-lm's own model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from oracles.whole_model import batch_loss, build_model
from support.models import Tiny, each_family, scored_of

from export.passes import engine as export_engine
from export.passes.engine import Compared, ExportEngine
from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from runtime.bundle.store import Bundle
from runtime.core.errors import BudgetError
from runtime.engine.sample import Row
from runtime.machine.footprint import Meter
from runtime.storage.row_weights import float_manifest

F32 = npt.NDArray[np.float32]
LENGTHS = (31, 9, 20, 32, 12)


class Replaced:
    """A checkpoint's rows, but for the matrices that `values` holds."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.values: dict[str, F32] = {}

    def rows(self, name: str, start: int, stop: int) -> F32:
        if name in self.values:
            return self.values[name][start:stop]
        return self.checkpoint.rows(name, start, stop)


def source_of(bundle: Bundle) -> Bundle:
    """The bundle, but with float weights that are read by rows."""
    return replace(bundle, manifest=float_manifest(bundle.manifest))


def dense(checkpoint: Checkpoint, reader: Replaced) -> nn.Module:
    """mlx-lm's model with the reader's values."""
    model = build_model(checkpoint.family, checkpoint.config)
    values = [
        (name, mx.array(reader.rows(name, 0, checkpoint.shape(name)[0])))
        for name in checkpoint.names()
    ]
    model.load_weights(values, strict=True)
    return model


@contextmanager
def inputs_of_linear(model: nn.Module, found: dict[str, list[F32]]) -> Iterator[None]:
    """Record the input of every linear layer of a dense model, by its name."""
    names = {id(module): name for name, module in model.named_modules()}
    call = nn.Linear.__call__

    def recorded(self: nn.Linear, x: mx.array) -> mx.array:
        found.setdefault(names[id(self)], []).append(np.array(x[0]))
        return call(self, x)

    nn.Linear.__call__ = recorded
    try:
        yield
    finally:
        nn.Linear.__call__ = call


@pytest.fixture
def rows(rng: np.random.Generator) -> list[Row]:
    return [Row(rng.integers(0, 300, n + 1).astype(np.int32), scored_of(rng, n)) for n in LENGTHS]


def engine_of(folder: Path, budget: int = 10**9) -> ExportEngine:
    return ExportEngine(Meter(), budget, lambda what, done, total: None, lambda text: None, folder)


@each_family
def test_inputs_of_products_are_those_of_the_dense_model(
    tiny: Tiny, rows: list[Row], tmp_path: Path, rng: np.random.Generator, family: str
) -> None:
    """A matrix that is replaced while the pass stands before its product is used from then on."""
    bundle = tiny(family)
    with open_checkpoint(f"random:tiny-{family}", seed=0) as checkpoint:
        reader = Replaced(checkpoint)
        run = engine_of(tmp_path).open(source_of(bundle), reader, rows, 0)
        found: dict[str, list[F32]] = {}
        run.embed()
        for index in range(1, len(bundle.manifest.blocks) - 1):
            for products in run.layer(index):
                inputs = [np.array(x) for x in products.inputs()]
                found |= dict.fromkeys(products.names, inputs)
                for name in products.names:
                    tensor = f"{name}.weight"
                    value = checkpoint.rows(tensor, 0, checkpoint.shape(tensor)[0])
                    changed = value + 0.02 * rng.normal(size=value.shape).astype(np.float32)
                    reader.values[tensor] = changed
        hidden = [np.array(x) for x in run.head().inputs()]
        model = dense(checkpoint, reader)
        expected: dict[str, list[F32]] = {}
        with inputs_of_linear(model, expected):
            for row, h in zip(rows, hidden, strict=True):
                given = model.model(mx.array(row.tokens[None, :-1]))[0]
                np.testing.assert_allclose(h, np.array(given), rtol=2e-4, atol=2e-4)
        assert set(found) == {name for name in expected if name != "lm_head"}
        for name, inputs in found.items():
            for x, want in zip(inputs, expected[name], strict=True):
                np.testing.assert_allclose(x, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_comparison_with_a_bundle(
    tiny: Tiny,
    rows: list[Row],
    tmp_path: Path,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_checkpoint(f"random:tiny-{family}", seed=0) as checkpoint:
        bundle = tiny(family)
        reader = Replaced(checkpoint)
        engine = engine_of(tmp_path)
        source = Compared(source_of(bundle), reader)
        found = engine.compare(source, Compared(bundle), rows, "some text")
        scored = [(row.tokens, row.scored) for row in rows]
        expected = batch_loss(dense(checkpoint, reader), scored).item()
        assert found.source_loss == pytest.approx(expected, abs=1e-5)
        assert found.tokens == sum(len(row.scored) for row in rows) and found.rows == len(rows)
        assert found.divergence > 1e-4 and found.loss != found.source_loss
        monkeypatch.setattr(export_engine, "COMPARED_ROWS", 2)  # the last rows are fewer
        again = engine.compare(source, Compared(bundle), rows, "some text")
        assert again.divergence == pytest.approx(found.divergence, rel=1e-6)
        assert again.loss == pytest.approx(found.loss, rel=1e-6)
        assert again.text == "some text" and again.rows == found.rows


def test_a_budget_that_is_too_small_is_refused(tiny: Tiny, rows: list[Row], tmp_path: Path) -> None:
    with open_checkpoint("random:tiny-qwen2", seed=0) as checkpoint:
        source = source_of(tiny("qwen2"))
        with pytest.raises(BudgetError, match=r"20 MB < \d+ MB needed"):
            engine_of(tmp_path, 20_000_000).open(source, checkpoint, rows, 0)
