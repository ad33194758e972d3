"""A bundle's weights plus an adapter's terms, as a checkpoint that is read by rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from export.sources.families import completed_config, expected_shapes
from export.sources.model_classes import model_module
from export.sources.source import Checkpoint, check_tensors
from export.stored import (
    F32,
    FloatForm,
    FloatType,
    QuantizedForm,
    QuantizedRows,
    StoredForm,
    numpy_type,
)
from runtime.adapters.fused import adapters_in, digest_of, refuse_held
from runtime.arrays.stored import Extent, Matrix
from runtime.bundle.store import TOKENIZER, Bundle
from runtime.core.errors import BundleError
from runtime.core.files import read_file, read_into, reading_errors

_WEIGHT = ".weight"


@dataclass(frozen=True)
class LowRank:
    """An adapter's term of a matrix W (R, C): scale * (a b)^T, with a (C, r) and b (r, R).

    Of a `lookup`, an embedding, it is scale * a b, with a (R, r) and b (r, C).
    """

    a: F32
    b: F32
    scale: float
    lookup: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """That of W."""
        inputs, outputs = self.a.shape[0], self.b.shape[1]
        return (inputs, outputs) if self.lookup else (outputs, inputs)

    def rows(self, start: int, stop: int) -> F32:
        """Rows start:stop of it, (stop - start, C)."""
        left, right = (self.a, self.b.T) if self.lookup else (self.b.T, self.a)
        part = np.float32(self.scale) * left[start:stop]  # (stop - start, r)
        with np.errstate(over="ignore", invalid="ignore"):  # of damaged adapters, who uses it says
            product: F32 = np.matmul(part, right.T, dtype=np.float32)
        return product


class FusedCheckpoint(Checkpoint):
    """The model that a bundle and an adapter are together.

    Rows are dequantized and added to in float32 when they are read. Nothing of the weights stays in
    memory between two reads. A matrix to which nothing is added can also be read as its integers.

    Args:
        bundle: an open bundle, whose checksums have been checked.
        added: the adapter's terms, by the names of the manifest's matrices.

    Raises:
        BundleError: the weights cannot be opened, or the tensors are not those that the
            configuration implies.
        UsageError: the bundle holds this adapter already.
        ValueError: something is added to a matrix that is not there, or has another shape.
    """

    remedy = "the adapter is damaged, or has diverged; fuse an earlier save, or another adapter"

    def __init__(self, bundle: Bundle, added: Mapping[str, LowRank]) -> None:
        manifest = bundle.manifest
        shapes_at: dict[int, tuple[str, tuple[int, ...]]] = {  # by offset
            matrix.packed.offset: (f"{name}{_WEIGHT}", (matrix.rows, matrix.columns))
            for name, matrix in manifest.matrices.items()
        }
        shapes_at |= {
            extent.offset: (name, extent.shape) for name, extent in manifest.vectors.items()
        }
        shapes = dict(shapes_at[offset] for offset in sorted(shapes_at))
        for name, term in added.items():
            fits = shapes.get(f"{name}{_WEIGHT}") == term.shape
            if not fits or term.a.shape[1] != term.b.shape[0]:
                raise ValueError(f"what is added to {name} has the shape {term.shape}")
        source = str(manifest.provenance.get("name", bundle.path.name))
        digests = _digests(bundle, added)
        fused = {"adapted": len(added), "adapters": digests}
        provenance = {**manifest.provenance, "name": source, "fused": fused}
        config = _checked_config(bundle, shapes)
        super().__init__(manifest.family, config, provenance, shapes)
        self.bundle, self.added, self.digests = bundle, added, digests
        with reading_errors(bundle.weights_path):
            self._file = os.open(bundle.weights_path, os.O_RDONLY)

    def __enter__(self) -> FusedCheckpoint:
        return self

    def rows(self, name: str, start: int, stop: int) -> F32:
        self._check_rows(name, start, stop)
        vector = self.bundle.manifest.vectors.get(name)
        if vector is not None:
            return self._read(vector, start, stop).astype(np.float32)
        matrix = self._matrix(name)
        if matrix.is_float:
            values: F32 = self._read(matrix.packed, start, stop).astype(np.float32)
        else:
            values = self._quantized(matrix, start, stop).values(_form(matrix))
        added = self.added.get(name.removesuffix(_WEIGHT))
        if added is not None:
            values += added.rows(start, stop)
            if not np.isfinite(values).all():
                raise BundleError(
                    f"{name} is no longer finite with what the adapter adds: {self.remedy}"
                )
        return values

    def quantized_form(self, name: str) -> QuantizedForm | None:
        base = name.removesuffix(_WEIGHT)
        matrix = self.bundle.manifest.matrices.get(base)
        if matrix is None or matrix.is_float or base in self.added:
            return None
        return _form(matrix)

    def quantized_rows(self, name: str, start: int, stop: int) -> QuantizedRows:
        self._check_rows(name, start, stop)
        if self.quantized_form(name) is None:
            return super().quantized_rows(name, start, stop)
        return self._quantized(self._matrix(name), start, stop)

    def stored(self) -> tuple[dict[str, StoredForm], frozenset[str]]:
        """The stored form of each matrix, and the quantized ones to which nothing is added."""
        forms: dict[str, StoredForm] = {
            name: FloatForm(cast(FloatType, matrix.packed.dtype))
            if matrix.is_float
            else _form(matrix)
            for name, matrix in self.bundle.manifest.matrices.items()
        }
        copied = {name for name in forms if self.quantized_form(f"{name}{_WEIGHT}") is not None}
        return forms, frozenset(copied)

    def tokenizer_files(self) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for name in self.bundle.manifest.files:
            path = self.bundle.path / name
            with reading_errors(path):
                contents[name.removeprefix(f"{TOKENIZER}/")] = read_file(path)
        return contents

    def close(self) -> None:
        super().close()
        os.close(self._file)

    def _matrix(self, name: str) -> Matrix:
        return self.bundle.manifest.matrices[name.removesuffix(_WEIGHT)]

    def _quantized(self, matrix: Matrix, start: int, stop: int) -> QuantizedRows:
        """Rows of a quantized matrix as they are stored."""
        assert matrix.scales is not None, "a quantized matrix has scales"
        biases = None if matrix.biases is None else self._read(matrix.biases, start, stop)
        return QuantizedRows(
            self._read(matrix.packed, start, stop), self._read(matrix.scales, start, stop), biases
        )

    def _read(self, extent: Extent, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows of a tensor in its stored type."""
        row = extent.nbytes // extent.shape[0]
        octets = np.empty((stop - start) * row, np.uint8)
        with reading_errors(self.bundle.weights_path):
            read_into(self._file, extent.offset + start * row, octets.data)
        values = octets.view(numpy_type(extent.dtype))
        return values.reshape(stop - start, *extent.shape[1:])


def _digests(bundle: Bundle, added: Mapping[str, LowRank]) -> list[str]:
    """The digests of the adapters in a bundle's weights, and of the one that is added to them."""
    digests = adapters_in(bundle.manifest.provenance, str(bundle.path))
    if not added:
        return digests
    tensors = {
        f"{name}.{part}": np.ascontiguousarray(getattr(term, part), np.float32).tobytes()
        for name, term in added.items()
        for part in ("a", "b")
    }
    digest = digest_of(tensors.items(), next(iter(added.values())).scale)
    refuse_held(digest, digests, str(bundle.path))
    return [*digests, digest]


def _checked_config(bundle: Bundle, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The complete configuration of a bundle's model, whose tensors must have these shapes."""
    manifest, where = bundle.manifest, str(bundle.path)
    model_module(manifest.family, where)
    if (said := manifest.config.get("num_hidden_layers")) != len(manifest.layers):
        raise BundleError(
            f"{where} has {len(manifest.layers)} layers, its configuration says {said!r:.40}"
        )
    check_tensors(where, expected_shapes(manifest.family, manifest.config, where), shapes)
    return completed_config(manifest.family, manifest.config, where)


def _form(matrix: Matrix) -> QuantizedForm:
    """The stored form of a quantized matrix; float32 holds scales of bfloat16 exactly."""
    assert matrix.scales is not None and matrix.layout != "float"
    is_half = matrix.scales.dtype == "float16"
    dtype: Literal["float16", "float32"] = "float16" if is_half else "float32"
    return QuantizedForm(matrix.bits, matrix.group_size, matrix.layout, dtype)
