"""Writes a model as a checkpoint folder that transformers and mlx-lm load.

config.json            the configuration, in the spelling that both libraries read
model.safetensors      the weights, or shards of them and model.safetensors.index.json
tokenizer.json, ...    the bundle's tokenizer, with its chat template
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from export.fused.model import FusedCheckpoint
from export.fused.slices import Read, Slices
from export.recipe import expert_matrices
from export.sources.families import build_model, stored_numbers, transformers_config
from export.sources.model_classes import model_class
from export.sources.safetensors_files import INDEX
from export.sources.sanitize import tensors_made
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
            "PEFT adds the adapter to the whole model (ondevice adapter --to peft), mlx-lm to the "
            "text model (--to mlx), and --format bundle writes a fused bundle"
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
    mlx-lm adds to the values when it reads them. What is transposed is read by whole matrices.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Origin, str, int], ...]
    added: float = 0.0

    @property
    def read_as(self) -> tuple[int, int]:
        """How many rows or matrices there are to read, and the values of each."""
        whole = self.parts[0][0]
        count = (whole.stack or 1) * (1 if whole.transposed else whole.height)
        return count, math.prod(self.shape) // count

    def rows(self, model: FusedCheckpoint, start: int, stop: int) -> F32:
        """Those from start to stop, as rows of values."""
        (whole, own, top), values_of_each = self.parts[0], self.read_as[1]
        if whole == Origin(whole.name, 0, whole.height, whole.height):  # so without a second array
            rows = model.rows(own, top + start, top + stop).reshape(stop - start, values_of_each)
            return rows - np.float32(self.added) if self.added else rows
        if whole.transposed:
            start, stop = start * whole.height, stop * whole.height
            values_of_each //= whole.height
        values: F32 = np.empty((stop - start, values_of_each), np.float32)
        for part, own, top in self.parts:
            for number in range(start // part.height, -(-stop // part.height)):
                first = number * part.height + part.first - start
                _place(values, part, first, partial(model.rows, own), top + number * part.rows)
        if self.added:
            values -= np.float32(self.added)
        if whole.transposed:
            values = values.reshape(-1, whole.height, values_of_each).swapaxes(1, 2)
        return values


def _place(values: F32, part: Origin, first: int, read: Read, top: int) -> None:
    """Put rows of ours, from `top` on, where a part of a tensor has them, `first` in `values`."""
    every, columns = part.every, slice(None)
    if part.columns:
        left, count, _ = part.columns
        every, columns = 1, slice(left, left + (count - 1) * part.every + 1, part.every)
    low, high = (-(-(at - first) // every) for at in (0, len(values)))
    low, high = max(low, 0), min(high, part.rows)
    if low < high:
        rows = slice(first + low * every, first + (high - 1) * every + 1, every)
        values[rows, columns] = read(top + low, top + high).reshape(high - low, -1)


def _stored_tensors(model: FusedCheckpoint) -> dict[str, _Stored]:
    """The tensors of the checkpoint by name, as transformers has them."""
    origins = origins_in(model.provenance, "a checkpoint")
    numbers = stored_numbers(model.family, model.config)
    parts: dict[str, list[tuple[Origin, str, int]]] = {}
    for own in model.names():
        rows, top = model.shape(own)[0], 0
        for part in origins.get(own, (Origin(own, 0, rows, rows),)):
            parts.setdefault(part.name, []).append((part, own, top))
            top += part.all_rows
        if top != rows:
            raise BundleError(f"{own}: its list of tensors is damaged: {top} of {rows} rows")
    stored = {}
    for name, held in parts.items():
        (part, own, _), *_ = held = sorted({each[0]: each for each in held}.values())
        across = turned(model.shape(own))[1:]
        shape = (part.height, *(part.columns[2:] if part.columns else across))
        shape = shape[::-1] if part.transposed else () if own in numbers else shape
        shape = (part.stack, *shape) if part.stack else shape
        stored[name] = _Stored(shape, tuple(held))
    for name, number in _added_when_read(model, stored).items():
        stored[name] = replace(stored[name], added=number)
    return stored


def _without_origin(model: FusedCheckpoint) -> list[str]:
    """The last parts of names of experts' matrices whose tensors in the source are unknown."""
    manifest = model.bundle.manifest
    known = origins_in(manifest.provenance, "a checkpoint")
    unknown = {name for name in expert_matrices(manifest) if f"{name}.weight" not in known}
    return sorted({name.split(".")[-1] for name in unknown})


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


def _added_when_read(model: FusedCheckpoint, stored: Mapping[str, _Stored]) -> dict[str, float]:
    """What mlx-lm adds to tensors of a checkpoint whose filters are as transformers has them."""
    if all(turned(model.shape(name)) == model.shape(name) for name in model.names()):
        return {}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    own = build_model(model.family, model.config)
    made = tensors_made(own, shapes, str(model.provenance["name"]))
    return {part.source: part.shift for parts in made.values() for part in parts if part.shift}


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
            for part in slices.bytes_of(name, tensor.read_as, dtype, rows):
                file.write(part)
        file.flush()
        flush(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        flush_path(path)
