"""Weights in slices: every worker reads the same as from the whole file."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from support.bundles import Rng, Tiny
from support.slices import held

from runtime.core import stripes
from runtime.core.errors import WorkerError
from runtime.storage.weights import Weights


@pytest.mark.parametrize(
    ("holding", "prefetch"), [([1, 2], True), ([3, 1, 2], False), ([2, 1, 1], True)]
)
def test_workers_read_what_the_whole_file_holds(
    tiny: Tiny,
    rng: Rng,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holding: list[int],
    prefetch: bool,
) -> None:
    """Vectors, tiles in order and not, and rows; blocks read ahead, not read ahead, in vain."""
    monkeypatch.setattr(stripes, "STRIPE", 512)
    whole, bundle = Weights(tiny("qwen3")), tiny("qwen3")
    manifest = bundle.manifest
    with held(bundle, tmp_path, holding) as bundles:
        everyone = [Weights(each, prefetch) for each in bundles]
        for _ in range(2):
            for index in rng.permutation(len(manifest.blocks)):
                block = manifest.blocks[index]
                ahead = manifest.blocks[int(rng.integers(len(manifest.blocks)))]
                program = manifest.block_types[block.type]
                for weights in everyone:
                    weights.read_ahead(ahead)
                    for name in program.parameters:
                        expected = whole.vector(block.tensor(name))
                        assert mx.array_equal(weights.vector(block.tensor(name)), expected)
                    for matrix in manifest.matrices_of(block):
                        step = int(rng.integers(1, matrix.rows + 1))
                        starts = list(range(0, matrix.rows, step))
                        for start in starts if rng.random() < 0.8 else starts[::-1]:
                            rows = start, min(matrix.rows, start + step)
                            tiles = [s.tile(matrix, *rows) for s in (weights, whole)]
                            pairs = zip(*(tile.arrays for tile in tiles), strict=True)
                            assert all(mx.array_equal(a, b) for a, b in pairs)
                        chosen = rng.integers(0, matrix.rows, 9)
                        tiles = [s.gather(matrix, chosen) for s in (weights, whole)]
                        pairs = zip(*(tile.arrays for tile in tiles), strict=True)
                        assert all(mx.array_equal(a, b) for a, b in pairs)
                    weights.release(block)


def test_a_worker_receives_the_other_half_of_a_layer_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes, "STRIPE", 512)
    bundle = tiny("qwen3")
    with held(bundle, tmp_path, [1, 2]) as (first, _):
        weights = Weights(first, prefetch=True)
        layer = bundle.manifest.layers[0]
        start, stop = weights._ranges[layer]
        weights.read_ahead(layer)
        for matrix in bundle.manifest.matrices_of(layer):
            for row in range(0, matrix.rows, 7):
                weights.tile(matrix, row, min(row + 7, matrix.rows))
        assert first.holders is not None
        own, end = first.holders.own.portion(start, stop)
        received = stop - start - (end - own)
        assert first.holders.received_bytes == received
        for name in bundle.manifest.vectors:
            weights.vector(name)
        vectors = sum(extent.nbytes for extent in bundle.manifest.vectors.values())
        assert received < first.holders.received_bytes <= received + vectors


@pytest.mark.parametrize("prefetch", [True, False])
def test_each_pass_receives_each_layer_once(tiny: Tiny, tmp_path: Path, prefetch: bool) -> None:
    """In the order of `visits`; the backward pass begins with the layers that are still there."""
    bundle = tiny("qwen3")
    layers = bundle.manifest.layers * 4  # four visits of two layers, as if they were eight
    with held(bundle, tmp_path, [1, 2]) as (first, _):
        weights = Weights(first, prefetch)
        assembly = weights.assembly
        assert assembly is not None and first.holders is not None
        parts = {layer: weights._ranges[layer] for layer in layers}
        received: list[int] = []
        for version, layer in enumerate(layers):
            start, stop = parts[layer]
            if version + 1 < len(layers):
                assembly.read_ahead(0, version + 1, *parts[layers[version + 1]])
            assembly.view(0, version, start, stop, stop)
            assembly.view(0, version, start, stop, stop)
            own, end = first.holders.own.portion(start, stop)
            received.append(stop - start - (end - own))
        for version in reversed(range(len(layers))):
            start, stop = parts[layers[version]]
            if version:
                assembly.read_ahead(0, version - 1, *parts[layers[version - 1]])
            assembly.view(0, version, start, stop, stop)
        assert first.holders.received_bytes == sum(received) + sum(received[:-2])


def test_who_waits_for_a_lost_worker_hears_why(tiny: Tiny, tmp_path: Path) -> None:
    """A worker that has not opened its slice yet does not answer; then it is gone."""
    bundle = tiny("qwen3")
    with held(bundle, tmp_path, [1, 2], opened=False) as (first, _):
        weights = Weights(first, prefetch=True)
        layer = bundle.manifest.layers[0]
        weights.read_ahead(layer)
        assert first.holders is not None
        first.holders.stop(WorkerError("rank 1 is gone"))
        with pytest.raises(WorkerError, match="rank 1 is gone"):
            weights.tile(bundle.manifest.matrices_of(layer)[0], 0, 1)
