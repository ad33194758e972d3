"""Products with one tile of a frozen matrix, in either arithmetic, and their sums over tiles.

*packed*: `quantized_matmul` on the packed words. *unpacked*: the tile's columns are dequantized to
float32 and multiplied by GEMM; the affine shifts of the groups are a separate small product. A tile
is dequantized once, however many inputs are multiplied by it. A matrix in floating point is
multiplied by GEMM in both, its tiles converted to float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.dequantize import dequantize, group_sums, join, split
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import QuantizedTile, Tile


@dataclass(frozen=True)
class Input:
    """x (T, C), and its columns split like those of dequantized tiles."""

    x: mx.array
    parts: tuple[mx.array, ...]

    @classmethod
    def of(cls, x: mx.array, matrix: Matrix, packed: bool, arrays: Arrays) -> Input:
        quantized = packed and not matrix.is_float
        return cls(x, () if quantized else split(x, matrix.bits, arrays))


@dataclass(frozen=True)
class ReadyTile:
    """A tile of a matrix ready to be multiplied: either still packed, or its columns and shift."""

    matrix: Matrix
    packed: QuantizedTile | None
    columns: tuple[mx.array, ...]
    shift: mx.array | None

    @classmethod
    def of(cls, tile: Tile, matrix: Matrix, packed: bool, arrays: Arrays) -> ReadyTile:
        if packed and isinstance(tile, QuantizedTile):
            return cls(matrix, tile, (), None)
        return cls(matrix, None, dequantize(tile, matrix.bits, arrays), tile.shift)

    @classmethod
    def empty(cls, matrix: Matrix, rows: int, width: int) -> ReadyTile:
        """A dequantized tile (rows, width) of zeros, evaluated, for `fill`."""
        parts = 2 if matrix.bits == 4 else 1
        columns = tuple(mx.zeros((rows, width // parts)) for _ in range(parts))
        shift = None
        if matrix.biases is not None:
            shift = mx.zeros((rows, width // matrix.group_size))
        mx.eval(columns, shift)
        return cls(matrix, None, columns, shift)

    def fill(self, tile: ReadyTile, arrays: Arrays) -> None:
        """Copy the values of a dequantized tile of the same rows."""
        pairs = [*zip(self.columns, tile.columns, strict=True)]
        if self.shift is not None and tile.shift is not None:
            pairs.append((self.shift, tile.shift))
        for mine, values in pairs:
            arrays.put(mine, slice(None), values)

    def transposed_product(self, given: Input, onto: mx.array | None = None) -> mx.array:
        """x W^T (T, R') for the tile's rows, added to `onto` if it is given."""
        if not self.columns:
            y = self.quantized(given.x, transpose=True)
            return y if onto is None else onto + y
        factors = [*zip(given.parts, self.columns, strict=True)]
        if self.shift is not None:
            factors.append((group_sums(given.x, self.shift.shape[1]), self.shift))
        for part, column in factors:
            onto = part @ column.T if onto is None else mx.addmm(onto, part, column.T)
        assert onto is not None
        return onto

    def quantized(self, x: mx.array, transpose: bool) -> mx.array:
        """x times the tile as it is packed, or its transpose."""
        tile = self.packed
        assert tile is not None
        return mx.quantized_matmul(
            x,
            tile.words,
            tile.scales,
            tile.biases(self.matrix.bits),
            transpose=transpose,
            group_size=self.matrix.group_size,
            bits=self.matrix.bits,
        )


@dataclass
class RowSum:
    """The running sum over tiles of p_i W_i, (T, C), each term evaluated as it is added."""

    arrays: Arrays
    halves: list[mx.array] = field(default_factory=list)
    whole: mx.array | None = None  # packed products, or the sums of shifts (T, G)

    def add(self, part: mx.array, tile: ReadyTile, fade: mx.array | None = None) -> None:
        """Scale the sum by `fade` (T, 1), then add `part` (T, R') times the tile."""
        if not tile.columns:
            self._add_whole(tile.quantized(part, transpose=False), fade)
            self.arrays.settle(self.whole)
            return
        if self.halves:
            self._add_to_halves(part, tile.columns, fade)
        else:
            self.halves = [part @ column for column in tile.columns]
        if tile.shift is not None:
            self._add_whole(part @ tile.shift, fade)
            self.arrays.settle(self.whole)
        self.arrays.settle(self.halves)

    def _add_to_halves(
        self, part: mx.array, columns: tuple[mx.array, ...], fade: mx.array | None
    ) -> None:
        for column in columns:
            half = self.halves.pop(0)  # leaves no other reference to the array that is added to
            half = half if fade is None else half * fade
            self.halves.append(mx.addmm(half, part, column))
            del half

    def _add_whole(self, term: mx.array, fade: mx.array | None) -> None:
        if self.whole is not None:
            term = term + (self.whole if fade is None else self.whole * fade)
        self.whole = term

    @property
    def parts(self) -> list[mx.array]:
        """The arrays in which the sum is held so far."""
        return self.halves if self.whole is None else [*self.halves, self.whole]

    def result(self, group_size: int) -> mx.array:
        """The sum (T, C); the accumulator is consumed."""
        halves, whole = self.halves, self.whole
        self.halves, self.whole = [], None
        if not halves:
            assert whole is not None
            return whole
        total = join(tuple(halves), self.arrays)
        if whole is None:
            return total
        return total + mx.repeat(whole, group_size, axis=1)  # the same for a group's columns
