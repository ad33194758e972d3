"""Checkpoints for tests: the tensors of random ones, and folders to read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint

Arrays = dict[str, np.ndarray]


def whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.rows(name, 0, checkpoint.shape(name)[0])


def weights_of(preset: str) -> tuple[dict[str, Any], Arrays]:
    source = open_checkpoint(f"random:{preset}")
    return dict(source.config), {name: whole(source, name) for name in source.names()}


def write_folder(folder: Path, config: dict[str, Any], arrays: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(a) for name, a in arrays.items()}
    )
    return folder
