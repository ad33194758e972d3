"""Records of stored data in a manifest: byte ranges, matrices, graphs and files."""

from __future__ import annotations

from typing import Literal

import msgspec

ALIGNMENT = 64
PAGE = 16384  # macOS arm64 pages; a multiple of Linux's
DRAWN = 32  # columns of a matrix's input whose dropout is drawn together
ITEM_BYTES = {"uint32": 4, "float32": 4, "float16": 2, "bfloat16": 2}
FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
WITHOUT_PAGES = 256  # bytes; smaller buffers of a GPU share pages


def pages(nbytes: int) -> int:
    """The bytes of a GPU's buffer for so many bytes, in whole pages."""
    return nbytes if nbytes < WITHOUT_PAGES else -(-nbytes // PAGE) * PAGE


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the manifest's records: immutable, and unknown keys are an error."""


class Extent(Record, frozen=True):
    """`nbytes` bytes of weights.bin from `offset`, holding `dtype` values of `shape`."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Matrix(Record, frozen=True):
    """A frozen matrix (rows, columns), quantized in MLX's packed layout or in floating point.

    If quantized, row r of `packed` holds `columns` unsigned integers of `bits` bits, lowest bits
    first in uint32 words; value = scale * q + bias per group of `group_size` columns. `symmetric`
    stores no biases: bias = -2**(bits-1) * scale. In the layout `float`, `packed` holds the values
    themselves, (rows, columns), of 32 or 16 `bits`; `group_size` is 0 and there are no scales.
    `error` is what storing it did to the values: `relative_rms`, `rms` and `max`, or nothing if
    they are as the checkpoint has them.
    """

    rows: int
    columns: int
    bits: int
    group_size: int
    layout: Literal["symmetric", "affine", "float"]
    packed: Extent
    scales: Extent | None = None
    biases: Extent | None = None
    error: dict[str, float] = {}

    @property
    def is_float(self) -> bool:
        """Whether it is stored in floating point, and not quantized."""
        return self.layout == "float"

    @property
    def compact(self) -> bool:
        """Whether `runtime.arrays.packed_rows` can multiply by it where it lies."""
        short = self.scales is not None and self.scales.dtype in ("float16", "bfloat16")
        return short and self.bits in (4, 8)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where its words or values, scales and biases lie."""
        parts = (self.packed, self.scales, self.biases)
        return tuple(extent for extent in parts if extent is not None)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def part(self, number: int, of: int) -> Matrix:
        """Matrix `number` of the `of` equal ones that are stacked in this one by rows."""

        def cut(extent: Extent) -> Extent:
            nbytes, shape = extent.nbytes // of, (extent.shape[0] // of, *extent.shape[1:])
            return Extent(extent.offset + number * nbytes, nbytes, extent.dtype, shape)

        names = ("packed", "scales", "biases")
        parts = {name: cut(extent) for name, extent in zip(names, self.extents, strict=False)}
        return msgspec.structs.replace(self, rows=self.rows // of, **parts)

    @property
    def groups(self) -> int:
        """How many groups share a scale, in the whole matrix; 0 in floating point."""
        return 0 if self.is_float else self.rows * self.columns // self.group_size


class Graph(Record, frozen=True):
    """One serialized function: its file, checksum and signature, and the bytes that it takes.

    `workspace_bytes` is the peak of its intermediate arrays, `allocated_bytes` the size of all of
    them in whole pages; None where whoever traced it did not say. `views` has for each result the
    input, counted from 0, whose whole memory it is, or -1; without it, none is known to be one.
    """

    file: str
    nbytes: int
    sha256: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    workspace_bytes: int
    allocated_bytes: int | None = None
    views: tuple[int, ...] = ()


class File(Record, frozen=True):
    """A small file of the bundle."""

    nbytes: int
    sha256: str


class Block(Record, frozen=True):
    """One block: its tensors are named `name.relative`, or `relative` where it has no name."""

    name: str
    type: str  # which of the manifest's block types it is

    def tensor(self, relative: str) -> str:
        """The full name of one of its tensors."""
        return f"{self.name}.{relative}" if self.name else relative

    @property
    def label(self) -> str:
        """Its name in messages: the type if it has no name."""
        return self.name or self.type
