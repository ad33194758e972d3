"""Writes an adapter for llama.cpp, as a GGUF file that goes with the model's own.

llama.cpp scales an adapter's output by alpha / rank, and knows nothing of rsLoRA: the alpha in the
file is our scale times the rank. Tensors are named after the model's, and the rows of B and columns
of A are in the order in which llama.cpp has those of the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFType, GGUFWriter, Keys, LlamaFileType

from export.adapters.adapter import Adapter, base_model
from export.sources.gguf_file import is_adapter
from export.sources.gguf_names import (
    WITHOUT_ADAPTER,
    Index,
    architecture_beside,
    architecture_of,
    place_of,
    tensor_names,
)
from export.stored import F32
from runtime.adapters.names import A, B
from runtime.core.errors import UsageError
from runtime.core.files import flush_path, storage_errors
from runtime.core.folder_writer import FolderWriter

SUFFIX = ".gguf"


def write_gguf(adapter: Adapter, output: Path, force: bool, base: str | None) -> None:
    """Write a file for llama.cpp's `--lora`.

    `base` is the name of the model; without it that of the bundle's source.

    Raises:
        UsageError: the file exists, or llama.cpp has no such tensors.
        StorageError: it cannot be written.
    """
    manifest = adapter.manifest
    architecture_of(manifest.family)
    if output.is_dir():
        raise UsageError(
            f"{output} is a folder, and llama.cpp's adapter is one file; give --output "
            f"{output / 'adapter.gguf'}"
        )
    with FolderWriter(output, force, "", "GGUF file of an adapter", is_adapter) as writer:
        path = writer.folder / f"adapter{SUFFIX}"
        with storage_errors(output):
            _write(adapter, path, base_model(manifest.provenance)[0] if base is None else base)
            flush_path(path)
        writer.finish(path)


def _write(adapter: Adapter, path: Path, base: str) -> None:
    lora = adapter.manifest.lora
    family, provenance = adapter.manifest.family, adapter.manifest.provenance
    file = GGUFWriter(path, architecture_beside(family, provenance))
    file.add_type(GGUFType.ADAPTER)
    file.add_file_type(LlamaFileType.ALL_F32)
    file.add_string(Keys.Adapter.TYPE, "lora")
    file.add_float32(Keys.Adapter.LORA_ALPHA, lora.scale * lora.rank)
    if base:
        file.add_base_model_count(1)
        file.add_base_model_name(0, base)
    _add_tensors(file, adapter)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _add_tensors(file: GGUFWriter, adapter: Adapter) -> None:
    manifest = adapter.manifest
    name_of = tensor_names(manifest.family, len(manifest.layers))
    if adapter.lookup and adapter.tied:
        raise UsageError(
            f"--to gguf: llama.cpp would take the adapter of {adapter.lookup} for the head too, "
            "which multiplies by the same matrix, and has it in the wrong shape there; ondevice "
            "fuse --format gguf adds it to the weights"
        )
    pieces: dict[str, list[tuple[F32, F32]]] = {}  # by the file's name: A (in, r) and B (r, out)
    for module, (a, b) in adapter.modules.items():
        name = f"{module}.weight"
        stored = name_of(name)
        if stored is None:
            raise UsageError(f"--to gguf: llama.cpp's {file.arch} has no tensor for {name}")
        if module.rpartition(".")[2] in WITHOUT_ADAPTER.get(manifest.family, ()):
            raise UsageError(
                f"--to gguf: llama.cpp multiplies by {file.arch}'s {module} without its adapter; "
                "ondevice fuse --format gguf adds it to the weights"
            )
        if module != adapter.lookup:
            place = place_of(manifest.family, manifest.config, name, (b.shape[1], a.shape[0]))
            a = _spread(a, place.shape[1], place.columns)
            b = _spread(b.T, place.shape[0], place.rows).T
        pieces.setdefault(stored, []).append((a, b))
    for stored, parts in pieces.items():
        a = np.concatenate([a for a, _ in parts], axis=1)
        b = np.concatenate([b for _, b in parts])
        is_lookup = stored == name_of(f"{adapter.lookup}.weight")
        # llama.cpp divides alpha by each rank; of an embedding it looks up rows of (V, r)
        file.add_tensor(f"{stored}.{A}", np.ascontiguousarray(a if is_lookup else a.T))
        file.add_tensor(f"{stored}.{B}", np.ascontiguousarray(b.T * np.float32(len(parts))))


def _spread(rows: F32, count: int, index: Index | slice | None) -> F32:
    """So many rows, of which those of an index are the given ones, and the others 0."""
    if index is None:
        return rows
    spread: F32 = np.zeros((count, rows.shape[1]), np.float32)
    spread[index] = rows
    return spread
