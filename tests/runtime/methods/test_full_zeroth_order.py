"""Training of all parameters: bit for bit the monolithic algorithm, from whole and torn slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.whole_model_full import MonolithicFullMeZO
from support.bundles import Rng, Tiny
from support.full_weights import EPSILON, all_of, full, method_of, weights_of
from support.lengths import at_length
from support.models import model_of, packed_of, row_of

from runtime.bundle.store import Bundle
from runtime.engine.sample import Row
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.full.weights import FullWeights, slot_layouts
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Update
from runtime.storage.slots import Slots
from runtime.storage.weights import Weights


@at_length("steps", 3, 20)
@pytest.mark.parametrize(
    ("family", "storage"),
    [
        ("qwen2", "float32"),
        ("qwen3", "bfloat16"),
        ("gemma3", "float16"),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_steps_are_the_monolithic_algorithms_bit_for_bit(
    tiny: Tiny, rng: Rng, seed: int, family: str, storage: str, steps: int, tmp_path: Path
) -> None:
    bundle = full(tiny, family, storage)
    kind = str(rng.choice(["gaussian", "rademacher"]))
    queries, decay = int(rng.integers(1, 3)), float(rng.choice([0.0, 0.1]))
    weights = weights_of(bundle, tmp_path / "slots", seed, kind)
    sizes = {"tile_values": int(rng.integers(3_000, 40_000)), "chunk_rows": 130}
    model = model_of(bundle, 16, weights=weights, **sizes)
    oracle = MonolithicFullMeZO(bundle, RowNoise(Noise(seed, kind)), EPSILON, queries, decay)
    lanes = int(rng.integers(2, 7))
    method = method_of(
        model, weights, tmp_path, 2, queries=queries, weight_decay=decay, lanes=lanes
    )
    for step in range(steps):
        rows = [row_of(bundle, rng, int(rng.integers(3, 16))), packed_of(bundle, rng, 16, 3)]
        rate = float(rng.uniform(1e-4, 1e-2))
        loss, gradients = oracle.step(model, rows, step, rate)
        result = method.step(step, rate, [rows[:1], rows[1:]])
        assert result.record == [rate, gradients]
        assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(loss, rel=1e-12)
        if step == 1:
            method.settle()
    for name, expected in oracle.theta.items():
        rows_, columns, _ = weights.tensors[weights.owner[name]][name]
        found = np.empty((rows_, columns), np.float32)
        weights._fill(name, 0, rows_, found)
        assert (found == expected).all(), name


def trained(
    bundle: Bundle, rng: Rng, seed: int, folder: Path, steps: int, **options: str
) -> tuple[FullWeights, dict[int, Update | None]]:
    """Weights after some steps, and the updates of all steps, of which one was skipped."""
    weights = weights_of(bundle, folder / "slots", seed, **options)
    model = model_of(bundle, 16, weights=weights, tile_values=20_000)
    method = method_of(model, weights, folder, 1)
    log: dict[int, Update | None] = {}
    for step in range(steps):
        row = row_of(bundle, rng, 9)
        result = method.step(step, 1e-2, [[Row(row.tokens, row.scored)]])
        assert result.record is not None
        log[step] = Update(step, 1e-2, tuple(result.record[1]), 0.0)
    return weights, log


def test_torn_slots_lead_to_the_same_weights(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = full(tiny, str(rng.choice(["qwen2", "gemma3", "qwen3"])), "bfloat16")
    weights, log = trained(bundle, rng, seed, tmp_path, 5)
    expected = all_of(weights)
    path = tmp_path / "slots"
    for torn in range(4):
        if torn:
            data = np.fromfile(path, np.uint8)
            start, stop = weights.slots.extent(int(rng.integers(len(weights.tensors))), torn % 2)  # type: ignore[union-attr]
            for at in rng.integers(start, stop, 50).tolist():
                data[at] ^= int(rng.integers(1, 256))
            data.tofile(path)
        again = weights_of(bundle, path, seed, "gaussian", 5, dict(log))
        assert all_of(again) == expected
    path.unlink()
    assert all_of(weights_of(bundle, path, seed, "gaussian", 5, dict(log))) == expected
    again = weights_of(bundle, path, seed, "gaussian", 5, dict(log))
    again.settle()
    assert not again.updates
    assert all_of(weights_of(bundle, path, seed, done=5)) == expected


def test_slots_of_other_weights_and_of_later_steps_are_not_read(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = full(tiny, "qwen3", "float16")
    weights, log = trained(bundle, rng, seed, tmp_path, 3)
    assert weights.slots is not None
    layouts, path = slot_layouts(bundle.manifest), tmp_path / "slots"
    owners = [index for index, own in enumerate(weights.tensors) if own]
    others = Slots(path, layouts, b"others")
    assert {others.newest(index, 3) for index in owners} == {None}
    found = {weights.slots.newest(index, 3) for index in owners}
    assert {one.version for one in found if one is not None} == {2}
    early = weights_of(bundle, path, seed, done=1, updates={0: log[0]})
    without = FullWeights(
        bundle.manifest, Weights(bundle), None, RowNoise(Noise(seed)), done=1, updates={0: log[0]}
    )
    assert all_of(early) == all_of(without)


def test_rounding_loses_no_small_updates(tiny: Tiny, tmp_path: Path) -> None:
    """Many updates of a tenth of a step of bfloat16 each: to the nearest, all would be lost."""
    bundle = full(tiny, "qwen2", "bfloat16")
    name, row = "model.layers.0.mlp.up_proj", 3
    updates: dict[int, Update | None] = {step: Update(step, 1.0, (), 1e-3) for step in range(100)}
    weights = weights_of(bundle, tmp_path / "slots", 1, done=100, updates=updates)
    values = np.empty((row, 128), np.float32)
    weights._fill(name, 0, row, values)
    before = np.empty((row, 128), np.float32)
    weights_of(bundle, tmp_path / "slots", 1)._fill(name, 0, row, before)
    large = np.abs(before) > 1e-3
    mean = float((values[large] / before[large]).mean())
    assert mean == pytest.approx(0.999**100, rel=0.02)
