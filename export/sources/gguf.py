"""A GGUF file as a checkpoint, with the changes of llama.cpp's converter undone.

The converter renames the tensors, adds 1 to Gemma's norm weights, reorders the query and key rows
of llama, and so on: see `gguf_names`. All this is undone here, so that rows equal those of the
original checkpoint, up to the file's quantization. Quantized rows are reordered alike; the norms
are never quantized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from export.sources.families import build_model, normalise_config, parameter_shapes
from export.sources.gguf_blocks import TRANSCODINGS, Transcoding, transcode
from export.sources.gguf_config import (
    FURTHER,
    read_config,
    rope_tables,
    supported_family,
)
from export.sources.gguf_entries import as_in_file
from export.sources.gguf_file import GGUFFile, GGUFTensor
from export.sources.gguf_keys import unknown_metadata
from export.sources.gguf_names import (
    SEEING,
    TYPES,
    Index,
    Place,
    from_file,
    listed_in,
    place_of,
    tensor_names,
)
from export.sources.gguf_tokenizer import convert_tokenizer
from export.sources.sanitize import usual_origins
from export.sources.source import INSIDE, Checkpoint, check_tensors
from export.stored import F32, QuantizedForm, QuantizedRows
from runtime.adapters.fused import IN_GGUF, checked
from runtime.adapters.origins import RENAMED
from runtime.core.errors import BundleError

_EXPERTS = "_exps."  # in the names of tensors that have a matrix of each expert
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")  # with which the names of a block's tensors begin


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of a supported architecture, or the first of several that are parts of one.

    Raises BundleError for another architecture, and for a truncated or inconsistent file.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        meta = self._file.metadata
        arch = str(meta.get("general.architecture"))
        unknown = unknown_metadata(meta, supported_family(meta, str(path)), str(path))
        raw = read_config(self._file, str(path))
        try:
            config = normalise_config(raw, str(path), "output.weight" in self._file.tensors)
            family = str(config["model_type"])
            model = build_model(family, config, str(path))
        except BundleError as problem:
            raise as_in_file(problem, raw["model_type"], arch) from problem
        expected = parameter_shapes(model)
        self._stored = _stored_names(self._file, raw, expected)
        for name, stored in self._stored.items():
            if name in expected:
                self._file.tensors[stored] = _flat(
                    self._file.tensors[stored], expected[name], _EXPERTS in stored
                )
        self._listed = _listed(meta, family, expected, str(path))
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self._listed, (1,))
        shapes |= {name: self._file.tensors[stored].shape for name, stored in self._stored.items()}
        for name in self._stored.keys() & expected.keys():
            if shapes[name] == place_of(family, config, name, expected[name]).shape:
                shapes[name] = expected[name]  # a part of a tensor of all layers, or all of it
        check_tensors(str(path), expected, shapes)
        types = Counter(self._file.tensors[stored].type for stored in {*self._stored.values()})
        for stored in self._stored.values():
            self._file.check_readable(stored)
        provenance = {
            "kind": "gguf",
            "name": str(meta.get("general.name", path.stem)),
            "architecture": arch,
            "files": [{"name": name, "bytes": size} for name, size in self._file.parts.items()],
            "types": {type_.name: count for type_, count in sorted(types.items())},
        }
        if origins := usual_origins(family, model, expected):
            provenance[RENAMED] = origins
        if family in TYPES:
            provenance["model_type"] = TYPES[family]
        if arch in SEEING:
            provenance[INSIDE] = SEEING[arch][1][0]
        if digests := checked(meta.get(IN_GGUF, []), str(path)):
            provenance["fused"] = {"adapters": digests}
        super().__init__(family, config, provenance, expected)
        warnings = []
        if further := meta.get(f"{arch}.{FURTHER}", 0):
            warnings.append(
                f"{path}: its last {further} blocks predict the tokens after the next one, and are "
                "not read"
            )
        if unknown:
            warnings.append(
                f"{path}: {len(unknown)} entries of its metadata are not known and not used: "
                f"{', '.join(unknown)}"
            )
        if meta.get("tokenizer.ggml.model") == "gpt2" and not meta.get("tokenizer.ggml.pre"):
            warnings.append(
                f"{path} does not say how its tokenizer splits text (tokenizer.ggml.pre): it is "
                "split as GPT-2 does, which may give other tokens than the model learnt; convert "
                "the model again with a newer llama.cpp"
            )
        longest = raw["max_position_embeddings"]
        if longest < meta[f"{arch}.context_length"]:
            warnings.append(
                f"{path} turns positions otherwise where there are more than {longest:,} tokens; "
                "it is read as a model for sequences of at most so many"
            )
        self.warnings, self.given = warnings, {**raw, "model_type": TYPES.get(family, family)}

    def rows(self, name: str, start: int, stop: int) -> F32:
        self._check_rows(name, start, stop)
        if name in self._listed:
            return self._listed[name][start:stop].copy()
        place = self._place(name)
        index = place.row_index(start, stop)
        values = self._file.rows(self._stored[name], index, place.columns)
        return from_file(self.family, name, values)

    def quantized_form(self, name: str) -> QuantizedForm | None:
        transcoding = self._transcoding(name)
        return None if transcoding is None else transcoding.form

    def quantized_exactly(self, name: str) -> bool:
        transcoding = self._transcoding(name)
        return transcoding is not None and transcoding.is_exact

    def quantized_rows(self, name: str, start: int, stop: int) -> QuantizedRows:
        self._check_rows(name, start, stop)
        transcoding = self._transcoding(name)
        if transcoding is None:
            return super().quantized_rows(name, start, stop)
        stored, place = self._stored[name], self._place(name)
        part = place.columns if isinstance(place.columns, slice) else None
        octets = self._file.stored_rows(stored, place.row_index(start, stop), part)
        rows = transcode(octets, self._file.tensors[stored].type)
        if not isinstance(place.columns, np.ndarray):
            return rows
        size = transcoding.form.group_size
        return _with_groups(rows, place.columns[::size] // size)

    def tokenizer_files(self) -> dict[str, bytes]:
        return convert_tokenizer(self._file.metadata, str(self.provenance["name"]))

    def close(self) -> None:
        super().close()
        del self._file

    def _transcoding(self, name: str) -> Transcoding | None:
        if len(self.shape(name)) != 2:
            return None
        transcoding = TRANSCODINGS.get(self._file.tensors[self._stored[name]].type)
        if transcoding is not None and isinstance(columns := self._place(name).columns, np.ndarray):
            runs = columns.reshape(-1, transcoding.form.group_size)
            return transcoding if (np.diff(runs) == 1).all() else None
        return transcoding

    def _place(self, name: str) -> Place:
        return place_of(self.family, self.config, name, self.shape(name))


def _with_groups(rows: QuantizedRows, order: Index) -> QuantizedRows:
    """Rows whose groups of columns stand in another order: group i is their `order[i]`."""
    words = rows.words.reshape(len(rows.words), len(order), -1)[:, order]
    return QuantizedRows(
        np.ascontiguousarray(words).reshape(rows.words.shape),
        np.ascontiguousarray(rows.scales[:, order]),
        None if rows.biases is None else np.ascontiguousarray(rows.biases[:, order]),
    )


def _flat(tensor: GGUFTensor, expected: tuple[int, ...], of_experts: bool) -> GGUFTensor:
    """Experts (N, R, C) as (N * R, C), filters (C, W) as (C, W, 1), a vector as a row."""
    if expected == (1, *tensor.shape):
        return replace(tensor, shape=expected, row_bytes=tensor.shape[0] * tensor.row_bytes)
    if expected == (*tensor.shape, 1):
        return replace(tensor, shape=expected)
    if not of_experts or len(tensor.shape) != 3 or len(expected) != 2:
        return tensor
    count, rows, columns = tensor.shape
    return replace(tensor, shape=(count * rows, columns), row_bytes=tensor.row_bytes // rows)


def _listed(
    metadata: dict[str, Any], family: str, expected: Iterable[str], where: str
) -> dict[str, F32]:
    """Parameters (1,) that the file has as metadata: a number for each layer, or one for all."""
    places = {name: at for name in expected if (at := listed_in(family, name))}
    layers = 1 + max((layer for _, layer in places.values()), default=0)
    parameters = {}
    for name, (key, layer) in places.items():
        try:
            values: F32 = np.broadcast_to(np.asarray(metadata[key], np.float32), layers)
        except (LookupError, ValueError) as e:
            raise BundleError(f"{where}: metadata {key} must be a number for each layer") from e
        parameters[name] = values[layer : layer + 1]
    return parameters


def _stored_names(
    file: GGUFFile, config: dict[str, Any], expected: Iterable[str]
) -> dict[str, str]:
    """mlx-lm's name -> the file's, for all tensors of the file, but for a RoPE table that is used.

    A tensor that the model does not have is listed by the file's name, to be refused by it.
    """
    name_of = tensor_names(config["model_type"], config["num_hidden_layers"])
    stored = {name: name_of(name) for name in expected}
    present = {name: own for name, own in stored.items() if own is not None and own in file.tensors}
    others = file.tensors.keys() - set(present.values()) - rope_tables(file)
    first = config["num_hidden_layers"]
    count = file.metadata.get(f"{file.metadata['general.architecture']}.{FURTHER}", 0)
    blocks = {name: _BLOCK.match(name) for name in others}
    further = {name for name, at in blocks.items() if at and first <= int(at[1]) < first + count}
    return {**present, **{name: name for name in sorted(others - further)}}
