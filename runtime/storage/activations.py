"""Activations in memory-mapped scratch files that disappear with the process.

`Activations` are checkpoints between blocks: slot i of a row holds the input of block i, and during
the backward the gradient of that input. `RowValues` are values inside a block, between two
instructions; those of one row at a time are in memory.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.storage.scratch import drop_pages, map_scratch


class Activations:
    """`slots` checkpoints for each of `rows` rows, of at most `shape` (1, T, D).

    They are float32 or, in half of their place, bfloat16.
    """

    def __init__(
        self,
        folder: Path,
        slots: int,
        rows: int,
        shape: tuple[int, ...],
        name: str = "activations",
    ) -> None:
        self.rows = rows
        self._kinds: list[tuple[tuple[int, ...], mx.Dtype]] = []  # shapes and types, a few
        self._stored = array("H", bytes(2 * slots * rows))  # the kind's number from 1, by place
        self._values = int(np.prod(shape))
        self._stride = -(-self._values * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = map_scratch(folder, name, self._stride * slots * rows)

    @contextmanager
    def _view(self, slot: int, row: int) -> Iterator[npt.NDArray[Any]]:
        """The words of what is stored there; their pages are dropped at the end."""
        offset = (slot * self.rows + row) * self._stride
        shape, dtype = self._kind(slot, row)
        word = np.uint16 if dtype == mx.bfloat16 else np.float32  # NumPy has no bfloat16
        yield np.frombuffer(self._map, word, math.prod(shape), offset).reshape(shape)
        drop_pages(self._map, offset, self._stride)

    def put(self, slot: int, row: int, value: mx.array) -> None:
        """Store an evaluated (1, T, D) array."""
        if value.size > self._values:
            raise ValueError(f"{value.shape} does not fit a slot of {self._values} values")
        kind = tuple(value.shape), value.dtype
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._stored[slot * self.rows + row] = 1 + self._kinds.index(kind)
        words = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value
        with self._view(slot, row) as view:
            view[:] = np.array(words, copy=False)

    def get(self, slot: int, row: int) -> mx.array:
        """The array last stored there."""
        with self._view(slot, row) as view:
            value, dtype = mx.array(view), self._kind(slot, row)[1]
        return value.view(dtype) if dtype == mx.bfloat16 else value

    def _kind(self, slot: int, row: int) -> tuple[tuple[int, ...], mx.Dtype]:
        """The shape and the type of what is stored there."""
        number = self._stored[slot * self.rows + row]
        if not number:
            raise KeyError(f"nothing is stored in slot {slot} of row {row}")
        return self._kinds[number - 1]


class RowValues:
    """Named float32 values of each of `rows` rows, of at most `row_bytes` in all for a row."""

    def __init__(self, folder: Path, rows: int, row_bytes: int) -> None:
        self._stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = map_scratch(folder, "values", max(1, self._stride * rows))
        self._shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(rows)]

    def put(self, row: int, values: dict[str, mx.array]) -> None:
        """Store a row's evaluated values in the place of its earlier ones; `values` is emptied."""
        offset, end = row * self._stride, (row + 1) * self._stride
        self._shapes[row] = {}
        while values:
            name = next(iter(values))
            value = values.pop(name)
            if offset + value.nbytes > end or value.dtype != mx.float32:
                raise ValueError(f"{name} {value.shape} {value.dtype} does not fit its row")
            view = np.frombuffer(self._map, np.float32, value.size, offset)
            view[:] = np.array(value, copy=False).reshape(-1)
            self._shapes[row][name] = tuple(value.shape)
            offset += value.nbytes
            del value
        self._drop(row)

    def get(self, row: int) -> dict[str, mx.array]:
        """Copies of a row's values."""
        values = {}
        offset = row * self._stride
        for name, shape in self._shapes[row].items():
            size = math.prod(shape)
            values[name] = mx.array(np.frombuffer(self._map, np.float32, size, offset)).reshape(
                shape
            )
            offset += size * 4
        mx.eval(list(values.values()))
        self._drop(row)
        return values

    def _drop(self, row: int) -> None:
        if self._stride:
            drop_pages(self._map, row * self._stride, self._stride)
