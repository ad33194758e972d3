"""Fused bundles: the same layouts and graphs, and nothing new where there is no adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.bundles import runnable
from support.fusing import added, dense, fused_model, silent
from support.logits import apart, engine_logits
from support.models import Rng, Tiny, adapters_of

from export.fused.bundle import write_bundle
from export.fused.model import FusedCheckpoint
from runtime.adapters.fused import adapters_in
from runtime.arrays.stored import Matrix
from runtime.bundle.manifest import Quality
from runtime.bundle.store import Bundle, open_bundle
from runtime.bundle.trusted import are_trusted

QUALITY = Quality(0.01, 2.0, 2.01, 100, 2, "some text")


def write(model: FusedCheckpoint, output: Path, bits: int | None = None) -> Bundle:
    return write_bundle(model, output, bits, False, lambda bundle: QUALITY, silent)


def layout(matrix: Matrix) -> tuple[object, ...]:
    scales = None if matrix.scales is None else matrix.scales.dtype
    return matrix.bits, matrix.group_size, matrix.layout, matrix.packed.dtype, scales


def stored(bundle: Bundle, name: str) -> list[bytes]:
    data = bundle.weights_path.read_bytes()
    parts = bundle.manifest.matrices[name].extents
    return [data[part.offset : part.offset + part.nbytes] for part in parts]


@pytest.mark.parametrize("family", ("qwen2", "gemma3"))
def test_matrices_keep_their_layouts_and_are_as_near_as_rounding_allows(
    tiny: Tiny, tmp_path: Path, rng: Rng, family: str
) -> None:
    base = tiny(family, "mixed")
    adapters = adapters_of(base, rng)
    with fused_model(base, adapters) as model:
        write(model, tmp_path / "out")
    found = open_bundle(tmp_path / "out")
    found.verify()
    before, after = base.manifest, found.manifest
    assert after.quality == QUALITY and after.buckets == before.buckets
    assert after.provenance["fused"]["adapted"] == len(added(adapters))
    assert len(adapters_in(after.provenance, "")) == 1
    for name, matrix in after.matrices.items():
        assert layout(matrix) == layout(before.matrices[name]), name
        expected = dense(base, adapters, name)
        error = dense(found, adapters, name) - expected
        if f"{name}.lora_a" in adapters.tensors:
            a, b = (np.array(adapters.tensors[f"{name}.lora_{one}"], np.float64) for one in "ab")
            error -= adapters.scale * (a @ b).T
        allowed = {4: 0.12, 8: 0.008, 16: 0.004, 32: 1e-6}[matrix.bits]
        assert np.sqrt((error**2).mean() / (expected**2).mean()) < allowed, name


def test_without_an_adapter_the_same_bytes_are_written_and_run_at_once(
    tiny: Tiny, tmp_path: Path, rng: Rng
) -> None:
    base = tiny("qwen2")
    with FusedCheckpoint(base, {}) as model:
        found = write(model, tmp_path / "out")
    for name in base.manifest.matrices:
        assert stored(found, name) == stored(base, name)
    assert are_trusted(found.manifest)
    assert found.manifest.weights_sha256 == base.manifest.weights_sha256
    tokens = rng.integers(0, base.manifest.vocab_size, 20)
    expected = engine_logits(base, None, tokens)
    assert (engine_logits(runnable(tmp_path / "out"), None, tokens) == expected).all()


@pytest.mark.parametrize("bits", [8, 32])
def test_other_bits_lose_less(tiny: Tiny, tmp_path: Path, rng: Rng, bits: int) -> None:
    base = tiny("qwen3")
    adapters = adapters_of(base, rng)
    tokens = rng.integers(0, base.manifest.vocab_size, 20)
    with fused_model(base, adapters) as model:
        write(model, tmp_path / "same")
        fused = write(model, tmp_path / "other", bits)
    assert {matrix.bits for matrix in fused.manifest.matrices.values()} == {bits}
    expected = engine_logits(base, adapters, tokens)
    same, other = (
        apart(engine_logits(runnable(tmp_path / name), None, tokens), expected)
        for name in ("same", "other")
    )
    assert other < same / 3
    assert bits == 8 or other < 1e-5
