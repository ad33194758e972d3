"""Bases of what reaches each matrix, beside mlx-lm's own model and power iterations in float64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from oracles.whole_model import dense_model
from support.bundles import Rng, Tiny
from support.models import adapters_of, model_of, row_of

from runtime.arrays.stored import Block
from runtime.bundle.store import Bundle
from runtime.core.errors import UsageError
from runtime.engine.model import Model
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.methods.adapters import Adapters
from runtime.methods.zeroth.zo_act import ITERATIONS, PASSES, set_bases
from runtime.storage.activations import Activations


class Recorder(nn.Module):  # type: ignore[misc]
    """A linear layer that keeps what reaches it, (T, C) of every call."""

    def __init__(self, layer: nn.Module, seen: list[np.ndarray]) -> None:
        super().__init__()
        self._layer, self._seen = layer, seen

    def __call__(self, x: mx.array) -> mx.array:
        self._seen.append(np.array(x[0], np.float64))
        return self._layer(x)


def inputs_of(bundle: Bundle, rows: list[Row]) -> dict[str, np.ndarray]:
    """All inputs (T, C) of every adapted matrix over the rows."""
    model, manifest = dense_model(bundle), bundle.manifest
    seen: dict[str, list[np.ndarray]] = {}
    parents = dict(model.named_modules())
    for block in manifest.layers:
        for name in manifest.adapted(block):
            path = block.tensor(name)
            parent, _, attribute = path.rpartition(".")
            recorder = Recorder(parents[path], seen.setdefault(path, []))
            setattr(parents[parent], attribute, recorder)
    for row in rows:
        mx.eval(model(mx.array(row.inputs)[None]))
    return {path: np.concatenate(found) for path, found in seen.items()}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_bases_are_power_iterations_on_the_inputs(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path, family: str
) -> None:
    bundle = tiny(family)
    rows = [row_of(bundle, rng, int(rng.integers(12, 17))) for _ in range(3)]
    adapters = Adapters.initial(bundle.manifest, seed)
    before = {name: np.array(a, np.float64) for name, a in adapters.tensors.items()}
    samples: list[Sample] = [rows[0], rows[1], rows[2]]
    slots = Activations(tmp_path, 1, 3, (1, 16, bundle.manifest.hidden_size))
    model, forward, passed = model_of(bundle, 16), Model.forward_lanes, list[str]()

    def counted(model: Model, block: Block, *rest: Any) -> list[mx.array]:
        passed.append(block.label)
        return forward(model, block, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "forward_lanes", counted)
        set_bases(model, adapters, samples, slots)
    assert Counter(passed) == {block.label: 3 * PASSES for block in model.blocks[1:-1]}
    for path, x in inputs_of(bundle, rows).items():
        q = before[f"{path}.lora_a"]
        for _ in range(ITERATIONS):
            q = np.linalg.qr(x.T @ (x @ q))[0]
        found = np.array(adapters.tensors[f"{path}.lora_a"], np.float64)
        assert found.T @ found == pytest.approx(np.eye(found.shape[1]), abs=1e-5), path
        missed = [np.linalg.norm(x - x @ one @ one.T) for one in (found, q)]
        assert missed[0] == pytest.approx(missed[1], rel=1e-3), path
        best = np.linalg.svd(x, compute_uv=False)[found.shape[1] :]
        assert missed[0] < 1.1 * np.linalg.norm(best), path
        assert not np.array(adapters.tensors[f"{path}.lora_b"]).any()


def test_padding_and_the_packing_of_rows_change_no_basis(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    rows = [row_of(bundle, rng, 7), row_of(bundle, rng, 8)]
    found = []
    for samples, bucket in (([*rows], 16), ([*rows], 32), ([PackedRows(tuple(rows))], 16)):
        adapters = Adapters.initial(bundle.manifest, seed)
        slots = Activations(tmp_path, 1, 2, (1, bucket, bundle.manifest.hidden_size))
        set_bases(model_of(bundle, bucket), adapters, samples, slots)
        found.append(adapters.tensors)
    for name in found[0]:
        assert mx.allclose(found[0][name], found[1][name], atol=1e-3), name
    x = inputs_of(bundle, rows)
    for path in x:
        bases = [np.array(one[f"{path}.lora_a"], np.float64) for one in found]
        missed = [np.linalg.norm(x[path] - x[path] @ q @ q.T) for q in bases]
        assert missed == pytest.approx([missed[0]] * 3, rel=1e-2), path


def test_a_rank_above_the_inputs_is_refused(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("qwen2")
    adapters = adapters_of(bundle, rng)
    shapes = Adapters.shapes(bundle.manifest)
    columns = min(rows for name, (rows, _) in shapes.items() if name.endswith("lora_a"))
    lora = bundle.manifest.lora
    wide = bundle.with_lora(type(lora)(**{**lora.to_json(), "rank": columns + 1}))
    slots = Activations(tmp_path, 1, 1, (1, 16, bundle.manifest.hidden_size))
    with pytest.raises(UsageError, match=f"--lora-rank {columns + 1} is too large"):
        set_bases(model_of(wide, 16), Adapters(wide.manifest, adapters.tensors), [], slots)
