"""Activation checkpoints in a memory-mapped scratch file that disappears with the process.

Slot i of a row holds the input of block i, and during the backward the gradient of that input.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import mlx.core as mx
import numpy as np

from runtime.storage.scratch import drop_pages, map_scratch


class Activations:
    """`slots` checkpoints for each of `rows` rows, of at most `shape` (1, T, D) float32."""

    def __init__(self, folder: Path, slots: int, rows: int, shape: tuple[int, ...]) -> None:
        self.rows = rows
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._values = int(np.prod(shape))
        self._stride = -(-self._values * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = map_scratch(folder, "activations", self._stride * slots * rows)

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
        drop_pages(self._map, offset, self._stride)

    def get(self, slot: int, row: int) -> mx.array:
        """The array last stored there."""
        offset = self._offset(slot, row)
        shape = self._shapes[slot, row]
        view = np.frombuffer(self._map, np.float32, int(np.prod(shape)), offset)
        value = mx.array(view).reshape(shape)
        drop_pages(self._map, offset, self._stride)
        return value
