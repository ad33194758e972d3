"""Where kernels get frozen weights from: vectors, and matrices tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Block, Matrix


@dataclass(frozen=True)
class QuantizedTile:
    """Rows of a packed matrix: words (R, C*bits/32) uint32, scales (R, G) float32, and `shift`.

    value = scale * (q - 2**(bits-1)) + shift; `shift` (R, G) is None for symmetric groups.
    """

    words: mx.array
    scales: mx.array
    shift: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays as they were read."""
        return self.words, self.scales

    def biases(self, bits: int) -> mx.array:
        """MLX's affine biases: value = scale * q + bias."""
        zero = self.scales * -(2.0 ** (bits - 1))
        return zero if self.shift is None else zero + self.shift


@dataclass(frozen=True)
class FloatTile:
    """Rows of a matrix in floating point: values (R, C) in the type in which they are stored."""

    values: mx.array

    shift: ClassVar[None] = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays as they were read."""
        return (self.values,)


Tile = QuantizedTile | FloatTile


class WeightSource(Protocol):
    """The weights of a manifest, read from its weights file or from elsewhere."""

    def vector(self, name: str) -> mx.array:
        """A norm weight or bias, float32."""

    def tile(self, matrix: Matrix, start: int, stop: int) -> Tile:
        """Rows start:stop of a matrix, in fresh memory."""

    def columns(self, matrix: Matrix, start: int, stop: int) -> Tile:
        """Columns start:stop of a matrix, whole groups of them, in fresh memory."""

    def gather(self, matrix: Matrix, rows: npt.NDArray[np.int64]) -> Tile:
        """Chosen rows of a matrix, in the given order (an embedding lookup)."""

    def read_ahead(self, block: Block) -> None:
        """Begin to load a block that is needed soon, if that is faster."""

    def release(self, block: Block) -> None:
        """Free what the source still holds of a block."""


class RowReader(Protocol):
    """Named tensors of one or two dimensions, read as float32, such as those of a checkpoint."""

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start:stop of a tensor, (stop - start, C) or (stop - start,)."""


def new_rows(rows: int, columns: int) -> tuple[mx.array, npt.NDArray[np.float32]]:
    """A new float32 array (rows, columns), and its memory as NumPy sees it."""
    values = mx.zeros((rows, columns))
    mx.eval(values)
    return values, np.asarray(values)
