"""Writes an adapter's folder, a file of tensors and a configuration, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from export.adapters.adapter import F32
from runtime.core.files import write_atomic
from runtime.core.folder_writer import FolderWriter


def write_folder(
    output: Path,
    force: bool,
    weights: tuple[str, Mapping[str, F32], str],
    config: tuple[str, dict[str, Any]],
) -> None:
    """Write the folder.

    Args:
        output: where it is to be; it must not exist, unless `force` replaces it.
        weights: the name of the safetensors file, its tensors, and the library that it is for.
        config: the name and the content of the configuration.

    Raises:
        UsageError: it exists, or holds other files.
        StorageError: it cannot be written.
    """
    (file, tensors, library), (name, content) = weights, config
    with FolderWriter(
        output, force, name, "folder with an adapter", lambda path: path.name in (file, name)
    ) as writer:
        whole = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        write_atomic(writer.folder / file, save(whole, metadata={"format": library}))
        write_atomic(writer.folder / name, json.dumps(content, indent=2).encode() + b"\n")
        writer.finish()
