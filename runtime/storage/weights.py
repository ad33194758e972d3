"""Frozen weights, memory-mapped: copied out tile by tile, released block by block.

No part of weights.bin stays in memory: a tile is copied from the map into a fresh array when a
kernel asks for it, and `release` drops a block's pages from the process once it is done. Weights
that several workers hold in slices come from an assembly instead of the map.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Block, Extent, Matrix
from runtime.arrays.stored_codes import Stored
from runtime.arrays.weight_source import FloatTile, QuantizedTile, Tile
from runtime.bundle.manifest import block_range, dense_range
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError
from runtime.core.files import reading_errors
from runtime.core.stripes import WEIGHTS_FILE
from runtime.storage.read_ahead import ReadAhead

if TYPE_CHECKING:
    from runtime.storage.assembly import Assembly

NUMPY = {"uint32": np.uint32, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def _float32(values: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """A copy as float32."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _tile(matrix: Matrix, part: Callable[[Extent], npt.NDArray[np.generic]]) -> Tile:
    """A tile of a matrix: of each of its tensors the `part`, which is copied.

    NumPy computes the shifts here and now: MLX would have another thread do so.
    """
    packed, scales, biases = matrix.packed, matrix.scales, matrix.biases
    if scales is None:
        values = mx.array(part(packed))  # NumPy holds bfloat16 as uint16
        return FloatTile(values.view(mx.bfloat16) if packed.dtype == "bfloat16" else values)
    words, scale = mx.array(part(packed)), _float32(part(scales), scales.dtype)
    if biases is None:
        return QuantizedTile(words, mx.array(scale), None)
    shift = _float32(part(biases), biases.dtype) + scale * np.float32(2.0 ** (matrix.bits - 1))
    return QuantizedTile(words, mx.array(scale), mx.array(shift))


def _columns(values: npt.NDArray[Any], matrix: Matrix, start: int, stop: int) -> npt.NDArray[Any]:
    """What belongs to columns start:stop of a matrix, of its words, scales or biases."""
    first, last = (at * values.shape[1] // matrix.columns for at in (start, stop))
    return values[:, first:last]


class Weights:
    """A bundle's weights, mapped; with `prefetch` a thread brings blocks ahead.

    Unless it `releases` pages, those of the map stay until the system wants their memory.
    """

    def __init__(self, bundle: Bundle, prefetch: bool = False, releases: bool = True) -> None:
        manifest = self.manifest = bundle.manifest
        self._ranges = {block: block_range(manifest, block) for block in manifest.blocks}
        self._releases = releases
        self.assembly: Assembly | None = None
        self._vectors: dict[str, npt.NDArray[np.generic]] = {}  # where there is an assembly
        self._ahead: ReadAhead | None = None
        if bundle.holders is not None:
            from runtime.storage.assembly import Assembly  # whole bundles need not load it

            self.assembly = Assembly(bundle.holders, prefetch)
            layers = [self._ranges[block] for block in manifest.layers]
            self.assembly.open(WEIGHTS_FILE, bundle.held_path, layers)
            return
        size = manifest.weights_nbytes
        with reading_errors(bundle.weights_path):
            with bundle.weights_path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise BundleError(f"{bundle.weights_path} changed its size while it was opened")
                self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            self._ahead = ReadAhead(bundle.weights_path) if prefetch else None

    def _view(self, extent: Extent, start: int, stop: int) -> npt.NDArray[np.generic]:
        item = NUMPY[extent.dtype]
        row = math.prod(extent.shape[1:])
        nbytes = row * np.dtype(item).itemsize
        offset = extent.offset + start * nbytes
        if self.assembly is None:
            flat = np.frombuffer(self._map, item, (stop - start) * row, offset)
        else:
            end = extent.offset + stop * nbytes
            tensor_end = extent.offset + extent.nbytes
            flat = self.assembly.view(WEIGHTS_FILE, 0, offset, end, tensor_end).view(item)
        return flat.reshape(stop - start, *extent.shape[1:])

    def _floats(self, extent: Extent, start: int, stop: int) -> mx.array:
        return mx.array(_float32(self._view(extent, start, stop), extent.dtype))

    def _chosen(self, extent: Extent, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
        if self.assembly is None:
            chosen = self._view(extent, 0, extent.shape[0])[rows]
            self._drop(extent.offset, extent.offset + extent.nbytes)
            return chosen
        distinct, places = np.unique(rows, return_inverse=True)
        nbytes = extent.nbytes // extent.shape[0]
        octets = self.assembly.rows(WEIGHTS_FILE, 0, extent.offset, nbytes, distinct.tolist())
        chosen = octets.view(NUMPY[extent.dtype])[places]
        return chosen.reshape(len(rows), *extent.shape[1:])

    def stored(self, matrix: Matrix) -> Stored:
        """A whole matrix where it lies in the map."""
        return tuple(self._view(extent, 0, matrix.rows) for extent in matrix.extents)

    @contextmanager
    def mapped(self, matrix: Matrix, start: int, stop: int, by_columns: bool) -> Iterator[Stored]:
        """Rows start:stop of a matrix, or columns, where they lie in the map."""
        if by_columns:
            yield tuple(_columns(part, matrix, start, stop) for part in self.stored(matrix))
            return
        try:
            yield tuple(self._view(extent, start, stop) for extent in matrix.extents)
        finally:
            self._drop_rows(matrix, start, stop)

    def vector(self, name: str) -> mx.array:
        """A norm weight, bias or filter, float32."""
        extent = self.manifest.vectors[name]
        if self.assembly is None:
            return self._floats(extent, 0, extent.shape[0])
        if not self._vectors:
            self._vectors = self._all_vectors(self.assembly)
        return mx.array(_float32(self._vectors[name].reshape(extent.shape), extent.dtype))

    def _all_vectors(self, assembly: Assembly) -> dict[str, npt.NDArray[np.generic]]:
        """All vectors, which stay in memory: fetched by themselves, each would take a layer."""
        extents = self.manifest.vectors
        ranges = [(extent.offset, extent.offset + extent.nbytes) for extent in extents.values()]
        octets, at = assembly.ranges(WEIGHTS_FILE, 0, ranges), 0
        vectors: dict[str, npt.NDArray[np.generic]] = {}
        for name, extent in extents.items():
            vectors[name] = octets[at : at + extent.nbytes].view(NUMPY[extent.dtype])
            at += extent.nbytes
        return vectors

    def tile(self, matrix: Matrix, start: int, stop: int) -> Tile:
        """Rows start:stop of a matrix, copied out of the map."""
        tile = _tile(matrix, lambda extent: self._view(extent, start, stop))
        self._drop_rows(matrix, start, stop)
        return tile

    def columns(self, matrix: Matrix, start: int, stop: int) -> Tile:
        """Columns start:stop of a matrix, whole groups of them, copied out of the map."""

        def part(extent: Extent) -> npt.NDArray[np.generic]:
            columns = _columns(self._view(extent, 0, matrix.rows), matrix, start, stop)
            # contiguous: MLX would copy all that lies between the columns
            return np.ascontiguousarray(columns)

        return _tile(matrix, part)

    def gather(self, matrix: Matrix, rows: npt.NDArray[np.int64]) -> Tile:
        """Chosen rows of a matrix, in the given order (an embedding lookup)."""
        return _tile(matrix, lambda extent: self._chosen(extent, rows))

    def read_ahead(self, block: Block) -> None:
        """Begin to bring a block into the system's file cache; nothing without `prefetch`.

        Of weights in slices, begin to assemble a layer.
        """
        if self.assembly is not None:
            self.assembly.read_ahead(WEIGHTS_FILE, 0, *self._ranges[block])
        elif self._ahead is not None:
            self._ahead.request(*dense_range(self.manifest, block))

    def release(self, block: Block) -> None:
        """Drop the block's pages from this process; they stay in the system's file cache.

        Of weights in slices, the next block but one takes the memory of this one.
        """
        if self.assembly is not None:
            self.assembly.release()
        self._drop(*self._ranges[block])

    def _drop_rows(self, matrix: Matrix, start: int, stop: int) -> None:
        first, row = matrix.packed.offset, matrix.packed.nbytes // matrix.rows
        self._drop(first + start * row, first + stop * row)

    def _drop(self, start: int, stop: int) -> None:
        if self.assembly is not None:
            return
        if not self._releases or sys.platform == "darwin" or not hasattr(mmap, "MADV_DONTNEED"):
            return  # clean file pages are not part of a Mac's footprint
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
