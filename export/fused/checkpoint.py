"""Writes a model as a checkpoint folder that transformers and mlx-lm load.

config.json            the configuration, in the spelling that both libraries read
model.safetensors      the weights, or shards of them and model.safetensors.index.json
tokenizer.json, ...    the bundle's tokenizer, with its chat template
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from export.fused.model import FusedCheckpoint
from export.fused.rejoined import Rejoined
from export.fused.slices import Slices
from export.sources.families import build_model, stored_numbers, transformers_config
from export.sources.general import shifts
from export.sources.safetensors_files import INDEX
from export.sources.source import refuse_renamed, turned
from export.stored import F32, FloatType, numpy_type
from runtime.adapters.fused import IN_CONFIG
from runtime.core.documents import safetensors_header
from runtime.core.errors import StorageError, UsageError
from runtime.core.files import flush, flush_path, storage_errors
from runtime.core.folder_writer import FolderWriter
from runtime.core.notes import Progress
from runtime.core.units import format_bytes
from runtime.data.tokenizer_files import SMALL_FILES, TEMPLATES, VOCABULARY

CONFIG = "config.json"  # by which a finished folder is recognised
CODES: Mapping[FloatType, str] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def write_checkpoint(
    model: FusedCheckpoint,
    output: Path,
    dtype: FloatType,
    shard_bytes: int,
    force: bool,
    progress: Progress,
) -> int:
    """Write all files of a checkpoint, and return the bytes of its weights.

    Args:
        shard_bytes: the most bytes of tensors in a file, unless a single one is larger.
        force: whether a checkpoint that is there is replaced.

    Raises:
        BundleError: a value is not finite in `dtype`.
        StorageError: the disk has too little space, and nothing is left behind.
        UsageError: there is something at `output` already, or the model has other tensors in
            transformers.
    """
    refuse_renamed(model.provenance, "a checkpoint")
    if experts := model.bundle.manifest.expert_names:
        raise UsageError(
            f"a checkpoint: {', '.join(experts)} hold experts, which transformers and mlx-lm store "
            "in other tensors; mlx-lm reads the adapter (ondevice adapter --to mlx), and "
            "--format bundle writes a fused bundle"
        )
    item = numpy_type(dtype).itemsize
    tensors_of = Rejoined(model)
    sizes = {name: math.prod(tensors_of.shape(name)) * item for name in tensors_of.names()}
    tokenizer = model.tokenizer_files()
    config = transformers_config(model.family, model.config, dtype)
    added = _added_when_read(model)
    if model.digests:
        config[IN_CONFIG] = model.digests
    with FolderWriter(output, force, CONFIG, "checkpoint", _belongs) as writer:
        check_space(writer, sum(sizes.values()) + sum(map(len, tokenizer.values())))
        slices = Slices(sum(sizes.values()) // item, progress)
        shards = _shards(sizes, shard_bytes)
        files = _file_names(len(shards))
        for name, tensors in zip(files, shards, strict=True):
            numbers = stored_numbers(model.family, model.config) & {*tensors}
            path = writer.folder / name
            _write_tensors(path, tensors_of, tensors, dtype, slices, added, numbers)
        if len(shards) > 1:
            file_of = {
                name: file for file, names in zip(files, shards, strict=True) for name in names
            }
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
            _write(writer.folder / INDEX, json.dumps(index, indent=2).encode())
        for name, data in tokenizer.items():
            _write(writer.folder / name, data)
        _write(writer.folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False).encode())
        writer.finish()
    return sum(sizes.values())


def _belongs(path: Path) -> bool:
    """Whether a checkpoint has such a file."""
    names = {CONFIG, INDEX, VOCABULARY, *SMALL_FILES, TEMPLATES}
    return path.name in names or path.suffix == ".safetensors"


def check_space(writer: FolderWriter, needed: int) -> None:
    """Raise StorageError if the disk has too little space, before anything is written."""
    free = shutil.disk_usage(writer.folder).free
    if needed > free:
        raise StorageError(
            f"{writer.destination} needs about {format_bytes(needed, up=True)}, but only "
            f"{format_bytes(free)} are free there; make room, or choose another --output or --dtype"
        )


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The tensors' names in order, in groups of at most `most` bytes, or of a single tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _file_names(count: int) -> list[str]:
    """The names of so many weight files, as transformers gives them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _added_when_read(model: FusedCheckpoint) -> dict[str, float]:
    """What mlx-lm adds to tensors of a checkpoint whose filters are as transformers has them."""
    shapes = {name: turned(model.shape(name)) for name in model.names()}
    if all(shape == model.shape(name) for name, shape in shapes.items()):
        return {}
    return shifts(build_model(model.family, model.config), shapes, str(model.provenance["name"]))


def _write_tensors(
    path: Path,
    model: Rejoined,
    names: Sequence[str],
    dtype: FloatType,
    slices: Slices,
    added: Mapping[str, float],
    numbers: Container[str],
) -> None:
    """Write a safetensors file, a slice of a tensor at a time, without what is `added` later.

    `numbers` are the tensors that a checkpoint has as numbers.
    """
    shapes = {name: () if name in numbers else turned(model.shape(name)) for name in names}
    tensors = {name: (CODES[dtype], shape) for name, shape in shapes.items()}
    with storage_errors(path), path.open("wb") as file:
        file.write(safetensors_header(tensors, {"format": "pt"}))  # transformers asks for this word
        for name in names:
            read = partial(_shifted_rows, model, name, added.get(name, 0.0))
            parts = slices.bytes_of(name, model.shape(name), dtype, read)
            for part in parts:
                file.write(part)
        file.flush()
        flush(file.fileno())


def _shifted_rows(model: Rejoined, name: str, added: float, start: int, stop: int) -> F32:
    """Rows of a tensor, less what mlx-lm adds when it reads them."""
    rows = model.rows(name, start, stop)
    return rows - np.float32(added) if added else rows


def _write(path: Path, data: bytes) -> None:
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        flush_path(path)
