"""Records of stored data in a manifest: byte ranges, matrices, graphs and files."""

from __future__ import annotations

from typing import Literal

import msgspec

ALIGNMENT = 64
PAGE = 16384  # macOS arm64 pages; a multiple of Linux's
ITEM_BYTES = {"uint32": 4, "float32": 4, "float16": 2, "bfloat16": 2}


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the manifest's records: immutable, and unknown keys are an error."""


class Extent(Record, frozen=True):
    """`nbytes` bytes of weights.bin from `offset`, holding `dtype` values of `shape`."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Matrix(Record, frozen=True):
    """A frozen matrix (rows, columns) in MLX's packed layout.

    Row r holds `columns` unsigned integers of `bits` bits, lowest bits first in uint32 words;
    value = scale * q + bias per group of `group_size` columns. `symmetric` stores no biases:
    bias = -2**(bits-1) * scale. `error` is what storing them did to the checkpoint's values:
    `relative_rms`, `rms` and `max`, or nothing where they are the same.
    """

    rows: int
    columns: int
    bits: int
    group_size: int
    layout: Literal["symmetric", "affine"]
    packed: Extent
    scales: Extent
    biases: Extent | None = None
    error: dict[str, float] = {}

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where its words, scales and biases lie."""
        parts = (self.packed, self.scales, self.biases)
        return tuple(extent for extent in parts if extent is not None)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    @property
    def groups(self) -> int:
        """How many groups share a scale, in the whole matrix."""
        return self.rows * self.columns // self.group_size


class Graph(Record, frozen=True):
    """One serialized function: its file, checksum, signature, and the bytes of its workspace."""

    file: str
    nbytes: int
    sha256: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    workspace_bytes: int


class File(Record, frozen=True):
    """A small file of the bundle."""

    nbytes: int
    sha256: str
