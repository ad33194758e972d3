"""Memory-mapped scratch files that disappear with the process, and tensors that live in them.

A file is unlinked as soon as it is open. Its space is allocated before it is used, so a full disk
is an error at the start and not a crash later. The footprint does not include its pages, since the
system can write them to the file when it needs the memory.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO

import mlx.core as mx
import numpy as np

from runtime.core.files import reserve, storage_errors

COPY_BYTES = 1 << 20


def map_scratch(folder: Path, name: str, size: int) -> mmap.mmap:
    """A new unnamed file of `size` bytes in `folder`, mapped.

    Raises:
        StorageError: the disk is full.
    """
    with storage_errors(folder / name, size):
        fd, path = tempfile.mkstemp(".partial", f".{name}-", folder)
        try:
            Path(path).unlink()
            reserve(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)


def drop_pages(mapped: mmap.mmap, offset: int, size: int) -> None:
    """Drop whole pages from this process's memory; the file keeps their content."""
    if sys.platform != "darwin" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, offset, size)


class MappedTensors(MutableMapping[str, mx.array]):
    """Named float32 tensors in a scratch file: read as copies, written in place.

    The names and shapes are fixed; the values are zero until they are set.
    """

    def __init__(self, folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._offsets: dict[str, int] = {}
        self.nbytes = 0
        for tensor, shape in self._shapes.items():
            self._offsets[tensor] = self.nbytes
            self.nbytes += math.prod(shape) * 4
        self._map = map_scratch(folder, name, max(1, self.nbytes))

    def __getitem__(self, tensor: str) -> mx.array:
        return self.part(tensor, slice(None))

    def __setitem__(self, tensor: str, value: mx.array) -> None:
        if value.shape != self._shapes[tensor] or value.dtype != mx.float32:
            raise ValueError(f"{tensor}: {value.shape} {value.dtype}, not {self._shapes[tensor]}")
        self.put_part(tensor, slice(None), value)

    def part(self, tensor: str, rows: slice) -> mx.array:
        """A copy of some rows of a tensor."""
        value = mx.array(self._view(tensor)[rows])
        self._drop(tensor)
        return value

    def put_part(self, tensor: str, rows: slice, value: mx.array) -> None:
        """Set some rows of a tensor, in place."""
        self._view(tensor)[rows] = np.array(value, copy=False)
        self._drop(tensor)

    def __delitem__(self, tensor: str) -> None:
        raise TypeError("the names are fixed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _view(self, tensor: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        shape = self._shapes[tensor]
        flat = np.frombuffer(self._map, np.float32, math.prod(shape), self._offsets[tensor])
        return flat.reshape(shape)

    def _drop(self, tensor: str) -> None:
        """Unmap the pages that the tensor lies on; those it shares fault in again."""
        start = self._offsets[tensor] // mmap.PAGESIZE * mmap.PAGESIZE
        stop = self._offsets[tensor] + math.prod(self._shapes[tensor]) * 4
        drop_pages(self._map, start, stop - start)

    def write(self, file: IO[bytes]) -> None:
        """Write all values, in order."""
        for start in range(0, self.nbytes, COPY_BYTES):
            file.write(self._map[start : min(start + COPY_BYTES, self.nbytes)])
        drop_pages(self._map, 0, self.nbytes)

    def read(self, file: IO[bytes]) -> None:
        """Read the values that `write` wrote."""
        start = 0
        while chunk := file.read(COPY_BYTES):
            self._map[start : start + len(chunk)] = chunk
            start += len(chunk)
        drop_pages(self._map, 0, self.nbytes)
