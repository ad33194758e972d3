"""Fused models for tests: adapters as they are added or saved, and what a matrix becomes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from export.bundle import export_bundle
from export.fused.model import FusedCheckpoint, LowRank
from runtime.arrays.stored import Extent
from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters
from support.bundles import Rng, runnable, settings
from support.logits import apart, engine_logits

SAME = 1e-5  # of the largest logit: the same weights in float32


def silent(*progress: object) -> None:
    """Shows nothing."""


def added(adapters: Adapters) -> dict[str, LowRank]:
    names = [name.removesuffix(".lora_a") for name in adapters.tensors if name.endswith("lora_a")]
    return {
        name: LowRank(
            np.array(adapters.tensors[f"{name}.lora_a"]),
            np.array(adapters.tensors[f"{name}.lora_b"]),
            adapters.scale,
            name in adapters.manifest.adapted(adapters.manifest.blocks[0]),
        )
        for name in names
    }


def fused_model(bundle: Bundle, adapters: Adapters) -> FusedCheckpoint:
    return FusedCheckpoint(bundle, added(adapters))


def read_again(fused: Path, bundle: Bundle, adapters: Adapters, rng: Rng) -> Bundle:
    """A bundle of what was fused; it has the logits of the bundle and the adapters."""
    output = fused.parent / "again"
    made = export_bundle(settings(fused, output, bits=32, seq_lens=(32,)))
    tokens = rng.integers(0, bundle.manifest.vocab_size, 30)
    expected = engine_logits(bundle, adapters, tokens)
    assert apart(engine_logits(bundle, None, tokens), expected) > 0.01, "the adapter does nothing"
    again = runnable(made.path)
    assert apart(engine_logits(again, None, tokens), expected) < SAME
    return again


def saved(adapters: Adapters, folder: Path) -> Path:
    folder.mkdir()
    adapters.save(folder)
    return folder


def dense(bundle: Bundle, adapters: Adapters, name: str) -> np.ndarray:
    """A matrix (R, C) with its adapter, by MLX's own dequantization and a product in float64."""
    matrix = bundle.manifest.matrices[name]
    data = bundle.weights_path.read_bytes()

    def whole(extent: Extent) -> mx.array:
        raw = data[extent.offset : extent.offset + extent.nbytes]
        items = np.frombuffer(raw, {"bfloat16": np.uint16}.get(extent.dtype, extent.dtype))
        array = mx.array(items.reshape(extent.shape))
        return array.view(mx.bfloat16) if extent.dtype == "bfloat16" else array

    if matrix.is_float:
        base = whole(matrix.packed).astype(mx.float32)
    else:
        scales = whole(matrix.scales).astype(mx.float32)
        half = 2.0 ** (matrix.bits - 1)
        biases = -half * scales if matrix.biases is None else whole(matrix.biases)
        base = mx.dequantize(
            whole(matrix.packed),
            scales,
            biases.astype(mx.float32),
            group_size=matrix.group_size,
            bits=matrix.bits,
        )
    values = np.array(base, np.float64)
    if f"{name}.lora_a" in adapters.tensors:
        a, b = (np.array(adapters.tensors[f"{name}.lora_{part}"], np.float64) for part in "ab")
        values += adapters.scale * (a @ b).T
    return values
