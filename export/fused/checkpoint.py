"""Writes a model as a checkpoint folder that transformers and mlx-lm load.

config.json            the configuration, in the spelling that both libraries read
model.safetensors      the weights, or shards of them and model.safetensors.index.json
tokenizer.json, ...    the bundle's tokenizer, with its chat template
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from export.fused.model import FusedCheckpoint
from export.fused.slices import Slices
from export.sources.families import build_model, stored_numbers, transformers_config
from export.sources.model_classes import model_class
from export.sources.safetensors_files import INDEX
from export.sources.sanitize import shifts
from export.sources.source import INSIDE, turned
from export.stored import F32, FloatType, numpy_type
from runtime.adapters.fused import IN_CONFIG
from runtime.adapters.origins import Origin, origins_in
from runtime.core.documents import safetensors_header
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import flush, flush_path, storage_errors
from runtime.core.folder_writer import FolderWriter
from runtime.core.notes import Progress
from runtime.data.tokenizer_files import SMALL_FILES, TEMPLATES, VOCABULARY

CONFIG = "config.json"  # by which a finished folder is recognised
SPACE = "--output or --dtype"  # the options by which a model takes less space, or has more
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
    if experts := _without_origin(model):
        raise UsageError(
            f"a checkpoint: {', '.join(experts)} hold experts, which transformers has in other "
            "tensors than this bundle knows; PEFT and mlx-lm read the adapter (ondevice adapter "
            "--to peft, --to mlx), and --format bundle writes a fused bundle"
        )
    inside = model.provenance.get(INSIDE)
    if inside and model_class(model.family) is None:
        raise UsageError(
            f"a checkpoint: transformers has no class for {inside} without what sees or hears; "
            "PEFT adds the adapter to the whole model (ondevice adapter --to peft), and --format "
            "bundle writes a fused bundle"
        )
    item = numpy_type(dtype).itemsize
    stored = _stored_tensors(model)
    sizes = {name: math.prod(tensor.shape) * item for name, tensor in stored.items()}
    tokenizer = model.tokenizer_files()
    model_type = None if inside else model.provenance.get("model_type")
    config = transformers_config(model.family, model.config, dtype, model_type)
    if model.digests:
        config[IN_CONFIG] = model.digests
    with FolderWriter(output, force, CONFIG, "checkpoint", _belongs) as writer:
        needed = sum(sizes.values()) + sum(map(len, tokenizer.values()))
        writer.check_space(needed, SPACE)
        slices = Slices(sum(sizes.values()) // item, progress)
        shards = _shards(sizes, shard_bytes)
        files = _file_names(len(shards))
        for name, tensors in zip(files, shards, strict=True):
            chosen = {tensor: stored[tensor] for tensor in tensors}
            _write_tensors(writer.folder / name, model, chosen, dtype, slices)
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


@dataclass(frozen=True)
class _Stored:
    """A tensor of a checkpoint: its shape there, and the tensors here that are its rows, in order.

    Each of these has its name, and its first row that is one of this tensor's. `added` is what
    mlx-lm adds to the values when it reads them.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Origin, str, int], ...]
    added: float

    def rows(self, model: FusedCheckpoint, start: int, stop: int) -> F32:
        """Rows start:stop of it."""
        pieces, axis = [], 1 if self.parts[0][0].columns else 0
        for part, own, top in self.parts:
            if part.transposed:
                pieces.append(model.rows(own, top, top + part.rows)[:, start:stop])
                continue
            first, last = (min(max(row - part.first, 0), part.rows) for row in (start, stop))
            if first < last:
                pieces.append(model.rows(own, top + first, top + last))
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
        rows = rows.T if self.parts[0][0].transposed else rows
        return rows - np.float32(self.added) if self.added else rows


def _stored_tensors(model: FusedCheckpoint) -> dict[str, _Stored]:
    """The tensors of the checkpoint by name, as transformers has them."""
    origins = origins_in(model.provenance, "a checkpoint")
    numbers, added = stored_numbers(model.family, model.config), _added_when_read(model)
    parts: dict[str, list[tuple[Origin, str, int]]] = {}
    for own in model.names():
        rows, top = model.shape(own)[0], 0
        for part in origins.get(own, (Origin(own, 0, rows, rows),)):
            parts.setdefault(part.name, []).append((part, own, top))
            top += part.rows
        if top != rows:
            raise BundleError(f"{own}: its list of tensors is damaged: {top} of {rows} rows")
    stored = {}
    for name, held in parts.items():
        (part, own, _), *_ = held = sorted({each[0]: each for each in held}.values())
        across = turned(model.shape(own))[1:]
        shape = (part.height, *(part.columns[2:] if part.columns else across))
        shape = shape[::-1] if part.transposed else () if own in numbers else shape
        stored[name] = _Stored(shape, tuple(held), added.get(own, 0.0))
    return stored


def _without_origin(model: FusedCheckpoint) -> list[str]:
    """The last parts of names of experts' matrices whose tensors in the source are unknown."""
    manifest = model.bundle.manifest
    known = origins_in(manifest.provenance, "a checkpoint")
    experts = {
        name
        for block in manifest.layers
        for operation in manifest.block_types[block.type].operations
        if operation.experts
        for name in operation.matrices(block.tensor)
    }
    return sorted({name.split(".")[-1] for name in experts if f"{name}.weight" not in known})


def _belongs(path: Path) -> bool:
    """Whether a checkpoint has such a file."""
    names = {CONFIG, INDEX, VOCABULARY, *SMALL_FILES, TEMPLATES}
    return path.name in names or path.suffix == ".safetensors"


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
    model: FusedCheckpoint,
    stored: Mapping[str, _Stored],
    dtype: FloatType,
    slices: Slices,
) -> None:
    """Write a safetensors file, a slice of a tensor at a time."""
    tensors = {name: (CODES[dtype], tensor.shape) for name, tensor in stored.items()}
    with storage_errors(path), path.open("wb") as file:
        file.write(safetensors_header(tensors, {"format": "pt"}))  # transformers asks for this word
        for name, tensor in stored.items():
            rows = partial(tensor.rows, model)
            for part in slices.bytes_of(name, tensor.shape or (1,), dtype, rows):
                file.write(part)
        file.flush()
        flush(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        flush_path(path)
