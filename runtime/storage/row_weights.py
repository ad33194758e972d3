"""The unquantized model: weights in float32, read by rows from a checkpoint, and their manifest.

Lowering, planning and running take such a manifest like any other. It has no weights file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import ALIGNMENT, FLOAT_BITS, ITEM_BYTES, Block, Extent, Matrix
from runtime.arrays.weight_source import FloatTile, RowReader, new_rows
from runtime.bundle.manifest import Manifest

FLOAT = "float32"


def float_tables(
    matrices: Mapping[str, tuple[int, int]], vectors: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Matrix], dict[str, Extent], int]:
    """Matrices and vectors as float32, given their shapes, and the bytes of all.

    They have the offsets at which they would lie one after another in a weights file, vectors
    first. There need be no such file.
    """
    end = 0

    def placed(shape: tuple[int, ...]) -> Extent:
        nonlocal end
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * ITEM_BYTES[FLOAT]
        return Extent(start, end - start, FLOAT, shape)

    small = {name: placed(shape) for name, shape in vectors.items()}
    large = {
        name: Matrix(*shape, FLOAT_BITS[FLOAT], 0, "float", placed(shape))
        for name, shape in matrices.items()
    }
    return large, small, end


def float_manifest(manifest: Manifest) -> Manifest:
    """The manifest with every matrix as float32, at other offsets, without a weights file."""
    matrices, vectors, nbytes = float_tables(
        {name: (matrix.rows, matrix.columns) for name, matrix in manifest.matrices.items()},
        {name: extent.shape for name, extent in manifest.vectors.items()},
    )
    return msgspec.structs.replace(
        manifest, matrices=matrices, vectors=vectors, weights_nbytes=nbytes, weights_sha256=""
    )


SLICE_VALUES = 1 << 18  # the most that a reader is asked for at once, unless one row is longer


class RowWeights:
    """The weights of a `float_manifest`, whose matrix NAME is the reader's tensor NAME.weight.

    Tiles are filled slice by slice, so that a reader adds at most a slice to the memory of a tile,
    with what it needs to compute the slice. Every read asks the reader again.
    """

    def __init__(self, manifest: Manifest, reader: RowReader) -> None:
        self.manifest, self.reader = manifest, reader
        by_offset = {m.packed.offset: f"{name}.weight" for name, m in manifest.matrices.items()}
        self._offsets = sorted(by_offset)
        self._names = [by_offset[offset] for offset in self._offsets]

    def _place(self, matrix: Matrix) -> tuple[str, int]:
        """The reader's tensor that has a matrix, and its first row in there: of experts, a part."""
        at = bisect_right(self._offsets, matrix.packed.offset) - 1
        row_bytes = matrix.packed.nbytes // matrix.rows
        return self._names[at], (matrix.packed.offset - self._offsets[at]) // row_bytes

    def vector(self, name: str) -> mx.array:
        """A norm weight, bias or filter, float32."""
        return mx.array(self.reader.rows(name, 0, self.manifest.vectors[name].shape[0]))

    def tile(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        """Rows start:stop of a matrix."""
        name, top = self._place(matrix)
        values, filled = new_rows(stop - start, matrix.columns)
        step = max(1, SLICE_VALUES // matrix.columns)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            filled[first - start : last - start] = self.reader.rows(name, top + first, top + last)
        return FloatTile(values)

    def columns(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        """Columns start:stop of a matrix."""
        name, top = self._place(matrix)
        values, filled = new_rows(matrix.rows, stop - start)
        step = max(1, SLICE_VALUES // matrix.columns)
        for first in range(0, matrix.rows, step):
            last = min(matrix.rows, first + step)
            rows = self.reader.rows(name, top + first, top + last)
            filled[first:last] = rows[:, start:stop]
        return FloatTile(values)

    def gather(self, matrix: Matrix, rows: npt.NDArray[np.int64]) -> FloatTile:
        """Chosen rows of a matrix, in the given order; each is read once, neighbours together."""
        name, _ = self._place(matrix)
        distinct, places = np.unique(rows, return_inverse=True)
        table = np.empty((len(distinct), matrix.columns), np.float32)
        starts = np.flatnonzero(np.diff(distinct, prepend=-2) != 1)
        for start, stop in zip(starts, [*starts[1:], len(distinct)], strict=True):
            first, last = int(distinct[start]), int(distinct[stop - 1])
            table[start:stop] = self.reader.rows(name, first, last + 1)
        values, filled = new_rows(len(rows), matrix.columns)
        np.take(table, places, axis=0, out=filled)
        return FloatTile(values)

    def read_ahead(self, block: Block) -> None:
        """Do nothing: the reader decides what it keeps in memory."""

    def release(self, block: Block) -> None:
        """Do nothing: nothing is held between two reads."""
