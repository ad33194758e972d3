"""Checkpoints for tests: the tensors of random ones, and folders to read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from runtime.core.errors import BundleError

Arrays = dict[str, np.ndarray]


def whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.rows(name, 0, checkpoint.shape(name)[0])


def weights_of(preset: str) -> tuple[dict[str, Any], Arrays]:
    source = open_checkpoint(f"random:{preset}")
    return dict(source.config), {name: whole(source, name) for name in source.names()}


def write_folder(folder: Path, config: dict[str, Any], arrays: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", arrays)
    return folder


def write_weights(path: Path, arrays: dict[str, Any]) -> None:
    mx.save_safetensors(str(path), {name: mx.array(array) for name, array in arrays.items()})


def quantized(name: str, array: mx.array, **form: int) -> dict[str, mx.array]:
    """The three tensors that mlx-lm writes for a matrix."""
    base, parts = name.removesuffix(".weight"), mx.quantize(array, **form)
    names = (f"{base}.{part}" for part in ("weight", "scales", "biases"))
    return dict(zip(names, parts, strict=True))


def is_refused(source: Path | str, said: str) -> None:
    """No checkpoint is read from there, and the error says so."""
    with pytest.raises(BundleError, match=said):
        open_checkpoint(str(source))
