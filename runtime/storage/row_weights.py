"""Frozen weights in float32 that are read by rows, from a checkpoint instead of a weights file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Block, Matrix
from runtime.arrays.weight_source import FloatTile, RowReader, new_rows
from runtime.bundle.manifest import Manifest

SLICE_VALUES = 1 << 18  # the most that a reader is asked for at once, unless one row is longer


class RowWeights:
    """The weights of a `float_manifest`, whose matrix NAME is the reader's tensor NAME.weight.

    Tiles are filled slice by slice, so that a reader adds at most a slice to the memory of a tile,
    with what it needs to compute the slice. Every read asks the reader again.
    """

    def __init__(self, manifest: Manifest, reader: RowReader) -> None:
        self.manifest, self.reader = manifest, reader
        self._names = {m.packed.offset: f"{name}.weight" for name, m in manifest.matrices.items()}

    def vector(self, name: str) -> mx.array:
        """A norm weight or bias, float32."""
        (size,) = self.manifest.vectors[name].shape
        return mx.array(self.reader.rows(name, 0, size))

    def tile(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        """Rows start:stop of a matrix."""
        name = self._names[matrix.packed.offset]
        values, filled = new_rows(stop - start, matrix.columns)
        step = max(1, SLICE_VALUES // matrix.columns)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            filled[first - start : last - start] = self.reader.rows(name, first, last)
        return FloatTile(values)

    def gather(self, matrix: Matrix, rows: npt.NDArray[np.int64]) -> FloatTile:
        """Chosen rows of a matrix, in the given order; each is read once, neighbours together."""
        name = self._names[matrix.packed.offset]
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
