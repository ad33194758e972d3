"""Activation checkpoints in a memory-mapped scratch file that vanishes with the process.

Slot i of a row holds the input of block i, and later the gradient that has reached it. The file
is unlinked as soon as it is open and its space is allocated before it is used, so that a full disk
is an error at the start and not a crash in the middle.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from ondevice.bundle import storage_errors


class Activations:
    """`slots` checkpoints for each of `rows` rows, of at most `shape` (1, T, D) float32."""

    def __init__(self, folder: Path, slots: int, rows: int, shape: tuple[int, ...]) -> None:
        self.rows = rows
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._values = int(np.prod(shape))
        self._stride = -(-self._values * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._stride * slots * rows
        with storage_errors(folder / "activations"):
            fd, name = tempfile.mkstemp(prefix=".activations-", dir=folder)
            try:
                Path(name).unlink()
                allocate(fd, size)
                self._map = mmap.mmap(fd, size)
            finally:
                os.close(fd)

    def _offset(self, slot: int, row: int) -> int:
        return (slot * self.rows + row) * self._stride

    def put(self, slot: int, row: int, value: mx.array) -> None:
        """Store an evaluated (1, T, D) array."""
        offset = self._offset(slot, row)
        if value.size > self._values:
            raise ValueError(f"{value.shape} does not fit a slot of {self._values} values")
        self._shapes[slot, row] = value.shape
        view = np.frombuffer(self._map, np.float32, value.size, offset)
        view[:] = np.array(value, copy=False).reshape(-1)
        self._drop(offset)

    def get(self, slot: int, row: int) -> mx.array:
        """The array last stored there."""
        offset = self._offset(slot, row)
        shape = self._shapes[slot, row]
        view = np.frombuffer(self._map, np.float32, int(np.prod(shape)), offset)
        value = mx.array(view).reshape(shape)
        self._drop(offset)
        return value

    def _drop(self, offset: int) -> None:
        """Unmap the pages from this process; the file keeps them."""
        if sys.platform != "darwin" and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, offset, self._stride)


def allocate(fd: int, size: int) -> None:
    """Give a file `size` bytes of disk, or fail now (OSError) instead of at a page fault."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    block = bytes(1 << 20)
    left = size
    while left:
        left -= os.write(fd, block[: min(left, len(block))])
