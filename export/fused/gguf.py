"""Writes a model as a GGUF file that llama.cpp loads, as its converter would.

Norms and biases are float32. Matrices have the type that is asked for. Gemma's norm weights get
their 1 added, the query and key rows of Llama their order in the file, and so on: see
`export.sources.gguf_names`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from export.fused.checkpoint import SPACE
from export.fused.gguf_metadata import add_metadata, check_metadata, rope_tables
from export.fused.gguf_vocabulary import add_vocabulary
from export.fused.model import FusedCheckpoint
from export.fused.slices import Slices
from export.sources.gguf_entries import entries_of
from export.sources.gguf_file import is_model
from export.sources.gguf_names import (
    Place,
    architecture_of,
    listed_in,
    place_of,
    tensor_names,
    to_file,
)
from export.stored import F32, FloatType, numpy_type
from runtime.adapters.fused import IN_GGUF
from runtime.core.errors import UsageError
from runtime.core.files import flush_path, storage_errors
from runtime.core.folder_writer import FolderWriter
from runtime.core.notes import Progress

FILE = "model.gguf"  # in a folder
_EXACT = (
    ".bias",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
)  # matrices that llama.cpp has in float32: of routers
SUFFIX = ".gguf"
_GGML = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, whose bytes are made while they are written."""

    nbytes: int
    parts: Iterator[bytes]

    def tofile(self, file: IO[bytes]) -> None:
        """Write it; GGUFWriter calls this as it would an array's."""
        for part in self.parts:
            file.write(part)


def write_gguf(
    model: FusedCheckpoint, output: Path, dtype: FloatType, force: bool, progress: Progress
) -> Path:
    """Write a GGUF file at `output`, or in the folder `output` unless it is named so.

    Returns the file. `dtype` is the type of matrices.

    Raises:
        BundleError: a value is not finite in `dtype`.
        StorageError: the disk has too little space, and nothing is left behind.
        UsageError: there is something at `output` already, or a GGUF file cannot hold the model.
    """
    single = output.suffix == SUFFIX
    noun = "GGUF file of a model" if single else f"folder with a {FILE}"
    belongs = is_model if single else lambda path: path.name == FILE
    with FolderWriter(output, force, "" if single else FILE, noun, belongs) as writer:
        path = writer.folder / FILE
        with storage_errors(path):
            _write(model, path, dtype, writer, progress)
            flush_path(path)
        writer.finish(path if single else None)
    return output if single else output / FILE


def _write(
    model: FusedCheckpoint, path: Path, dtype: FloatType, place: FolderWriter, progress: Progress
) -> None:
    writer = GGUFWriter(path, architecture_of(model.family))
    writer.add_type("model")
    writer.add_name(str(model.provenance["name"]))
    writer.add_file_type(int(_GGML[dtype][1]))
    if model.digests:
        writer.add_array(IN_GGUF, model.digests)
    vocabulary = model.bundle.manifest.vocab_size
    add_metadata(writer, model.family, model.config, vocabulary)
    add_vocabulary(writer, model.tokenizer_files(), vocabulary)
    tensors = [*_add_rope_factors(writer, model), *_add_tensors(writer, model, dtype, progress)]
    check_metadata(writer, model.family, model.config)
    place.check_space(sum(tensor.nbytes for tensor in tensors), SPACE)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor)
    finally:
        writer.close()


def _add_rope_factors(writer: GGUFWriter, model: FusedCheckpoint) -> list[_Tensor]:
    """Announce the tables of the scaling of positions, where the model has some."""
    tables = rope_tables(model.config)
    for name, table in tables.items():
        writer.add_tensor_info(
            name, table.shape, table.dtype, table.nbytes, GGMLQuantizationType.F32
        )
    return [_Tensor(table.nbytes, iter([table.tobytes()])) for table in tables.values()]


def _add_tensors(
    writer: GGUFWriter, model: FusedCheckpoint, dtype: FloatType, progress: Progress
) -> list[_Tensor]:
    """Announce the model's tensors. Returns them in the order in which they are to be written."""
    name_of = tensor_names(model.family, int(model.config["num_hidden_layers"]))
    counts = entries_of(model.family).get("expert_count", "")
    parts: dict[str, list[str]] = {}  # of a tensor of the file
    lists: dict[str, dict[int, float]] = {}  # of parameters that are metadata, by layer
    for name in model.names():
        if at := listed_in(model.family, name):
            lists.setdefault(at[0], {})[at[1]] = float(model.rows(name, 0, 1)[0])
            continue
        stored = name_of(name)
        if stored is None:
            raise UsageError(
                f"--format gguf: {writer.arch} files have no tensor {name}; use --format hf"
            )
        parts.setdefault(stored, []).append(name)
    for key, values in lists.items():
        writer.add_array(key, [values[layer] for layer in sorted(values)])
    shapes = {stored: _place(model, names[0]).shape for stored, names in parts.items()}
    slices = Slices(sum(map(math.prod, shapes.values())), progress)
    tensors: list[_Tensor] = []
    for stored, shape in shapes.items():
        is_exact = len(shape) != 2 or stored.endswith(_EXACT)
        form: FloatType = "float32" if is_exact else dtype
        item = numpy_type(form)
        nbytes = math.prod(shape) * item.itemsize
        experts = model.config[counts] if stored.endswith("_exps.weight") else 0
        stated = (experts, shape[0] // experts, *shape[1:]) if experts else shape
        stated = stated[:2] if stated[2:] == (1,) else stated  # of filters
        writer.add_tensor_info(stored, stated, item, nbytes, _GGML[form][0])
        read = partial(_stored_rows, model, parts[stored], shape)
        tensors.append(_Tensor(nbytes, slices.bytes_of(parts[stored][0], shape, form, read)))
    return tensors


def _place(model: FusedCheckpoint, name: str) -> Place:
    return place_of(model.family, model.config, name, model.shape(name))


def _stored_rows(
    model: FusedCheckpoint, names: list[str], shape: tuple[int, ...], start: int, stop: int
) -> F32:
    """Rows start:stop of a tensor of the file, which has the values of these of the model."""
    places = {name: _place(model, name) for name in names}
    if all(place.rows is None and place.columns is None for place in places.values()):
        name = names[0]  # the only one, or that of the first of layers that have the same tensor
        return to_file(model.family, name, model.rows(name, start, stop))
    values: F32 = np.empty((stop - start, *shape[1:]), np.float32)
    for name, place in places.items():
        rows = place.rows
        held = np.arange(start, stop)  # rows of the model
        if rows is not None:
            held = np.flatnonzero((start <= rows) & (rows < stop))
        for run in np.split(held, np.flatnonzero(np.diff(held) != 1) + 1):
            if not run.size:
                continue
            written = to_file(model.family, name, model.rows(name, run[0], run[-1] + 1))
            at = (run if rows is None else rows[run]) - start
            if isinstance(place.columns, np.ndarray):
                written = written[:, np.argsort(place.columns)]
            values[at if not isinstance(place.columns, slice) else (at, place.columns)] = written
    return values
