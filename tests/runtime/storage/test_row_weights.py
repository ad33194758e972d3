"""Weights read by rows: a checkpoint's own values, through the model that its bundle describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.lengths import pairs
from support.models import FAMILIES, adapters_of, check_gradients, each_family, model_of, rows_of
from support.plans import plan_of, task_of

from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from runtime.bundle.checks import check_manifest
from runtime.bundle.store import Bundle
from runtime.storage import row_weights
from runtime.storage.row_weights import RowWeights, float_manifest


def opened(tiny: Tiny, family: str) -> tuple[Checkpoint, Bundle, RowWeights]:
    """The checkpoint of a tiny bundle, the bundle under its float manifest, and its weights."""
    checkpoint, bundle = open_checkpoint(f"random:tiny-{family}"), tiny(family)
    manifest = float_manifest(bundle.manifest)
    return checkpoint, replace(bundle, manifest=manifest), RowWeights(manifest, checkpoint)


class Counting:
    """A reader that remembers which rows it was asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.asked: list[tuple[int, int]] = []

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        self.asked.append((start, stop))
        return self.checkpoint.rows(name, start, stop)


@pytest.fixture
def few_at_once(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are asked for slices that divide nothing."""
    monkeypatch.setattr(row_weights, "SLICE_VALUES", int(rng.integers(1, 5000)))


@pytest.mark.usefixtures("few_at_once")
def test_tiles_and_chosen_rows_are_the_readers(tiny: Tiny, rng: Rng) -> None:
    checkpoint, bundle, weights = opened(tiny, "llama")
    for name, matrix in bundle.manifest.matrices.items():
        expected = checkpoint.rows(f"{name}.weight", 0, matrix.rows)
        start, stop = sorted(rng.choice(matrix.rows + 1, 2, replace=False).tolist())
        assert (np.array(weights.tile(matrix, start, stop).values) == expected[start:stop]).all()
        apart, together = rng.integers(0, matrix.rows, 30), np.arange(start, stop)
        rows = rng.permutation(np.concatenate([apart, together, [0, 0, matrix.rows - 1]]))
        assert (np.array(weights.gather(matrix, rows).values) == expected[rows]).all()
    for name, extent in bundle.manifest.vectors.items():
        assert (np.array(weights.vector(name)) == checkpoint.rows(name, 0, extent.shape[0])).all()


def test_a_row_is_read_once_however_often_it_is_chosen(tiny: Tiny) -> None:
    checkpoint, bundle, _ = opened(tiny, "qwen2")
    reader, matrix = Counting(checkpoint), bundle.manifest.matrices["model.embed_tokens"]
    RowWeights(bundle.manifest, reader).gather(matrix, np.array([7, 3, 7, 9, 8, 3, 0]))
    assert reader.asked == [(0, 1), (3, 4), (7, 10)]


@pytest.mark.parametrize("most", [1, 127, 300, 128 * 50, 1 << 18])
def test_a_reader_is_asked_for_a_slice_at_a_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Else a source that computes what it reads would hold a whole tile beside the tile."""
    monkeypatch.setattr(row_weights, "SLICE_VALUES", most)
    checkpoint, bundle, _ = opened(tiny, "qwen2")
    reader, matrix = Counting(checkpoint), bundle.manifest.matrices["model.embed_tokens"]
    RowWeights(bundle.manifest, reader).tile(matrix, 11, 211)
    assert [start for start, _ in reader.asked] == [11, *(stop for _, stop in reader.asked[:-1])]
    assert reader.asked[-1][1] == 211
    rows = max(stop - start for start, stop in reader.asked)
    assert rows == min(200, max(1, most // matrix.columns))


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize(("family", "arithmetic"), pairs(FAMILIES, ("unpacked", "packed")))
def test_loss_and_gradients_are_the_checkpoints(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, arithmetic: str
) -> None:
    checkpoint, bundle, weights = opened(tiny, family)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = model_of(bundle, 32, arithmetic, weights=weights)
    dense = reference.adapted(reference.checkpoint_model(checkpoint), adapters)
    check_gradients(dense, model, adapters, rows, tmp_path)


@each_family
def test_the_float_manifest_is_sound_and_can_be_planned(tiny: Tiny, family: str) -> None:
    original = tiny(family).manifest
    manifest = float_manifest(original)
    check_manifest(manifest)
    assert list(manifest.matrices) == list(original.matrices)
    values = sum(m.rows * m.columns for m in original.matrices.values())
    assert sum(m.nbytes for m in manifest.matrices.values()) == 4 * values
    offsets = [m.packed.offset for m in manifest.matrices.values()]
    assert len(set(offsets)) == len(offsets)
    assert plan_of(manifest, task_of(32)).predicted_peak_bytes > 0
