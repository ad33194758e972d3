"""Products with one tile of a frozen matrix, in either arithmetic, and their sums over tiles.

*packed*: `quantized_matmul` on the packed words. *unpacked*: the tile's columns are dequantized to
the type in which products are computed (`runtime.arrays.products`) and multiplied by GEMM; the
affine shifts of the groups are a separate small product, in float32. A tile is dequantized once,
however many inputs are multiplied by it. A matrix in floating point is multiplied by GEMM in both,
its tiles converted to that type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.products import Factor, Products
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import QuantizedTile, Tile


@dataclass(frozen=True)
class Input:
    """x (T, C), and its columns split like those of dequantized tiles, or (T, R) for their rows."""

    x: mx.array
    parts: tuple[Factor, ...]
    _sums: dict[int, mx.array] = field(default_factory=dict)

    def group_sums(self, groups: int, arrays: Arrays) -> mx.array:
        """Sums of x over each group of columns (T, G), the same for all tiles."""
        if groups not in self._sums:
            self._sums[groups] = arrays.group_sums(self.x, groups)
        return self._sums[groups]

    @classmethod
    def of(cls, x: mx.array, matrix: Matrix, packed: bool, products: Products) -> Input:
        """x for products with all columns of the matrix's tiles."""
        quantized = packed and not matrix.is_float
        return cls(x, () if quantized else products.split(x, matrix.bits))

    @classmethod
    def for_rows(cls, x: mx.array, products: Products, columns: slice | None = None) -> Input:
        """x, or some of its columns, for products with tiles that have as many rows."""
        part = x if columns is None else products.columns(x, columns)
        return cls(part, (products.whole(part),))


@dataclass(frozen=True)
class ReadyTile:
    """A tile of a matrix ready to be multiplied: either still packed, or its columns and shift."""

    matrix: Matrix
    products: Products
    packed: QuantizedTile | None
    columns: tuple[Factor, ...]
    shift: mx.array | None

    @classmethod
    def of(cls, tile: Tile, matrix: Matrix, packed: bool, products: Products) -> ReadyTile:
        if packed and isinstance(tile, QuantizedTile):
            return cls(matrix, products, tile, (), None)
        return cls(matrix, products, None, products.dequantize(tile, matrix.bits), tile.shift)

    @classmethod
    def empty(cls, matrix: Matrix, rows: int, width: int, products: Products) -> ReadyTile:
        """A dequantized tile (rows, width) of zeros, evaluated, for `fill`."""
        columns = products.empty(rows, width, matrix.bits)
        shift = None
        if matrix.biases is not None:
            shift = mx.zeros((rows, width // matrix.group_size))
            mx.eval(shift)
        return cls(matrix, products, None, columns, shift)

    def fill(self, tile: ReadyTile, arrays: Arrays) -> None:
        """Copy the values of a dequantized tile of the same rows."""
        for mine, values in zip(self.columns, tile.columns, strict=True):
            self.products.copy(values, mine)
        if self.shift is not None and tile.shift is not None:
            arrays.put(self.shift, slice(None), tile.shift)

    def transposed_product(self, given: Input, onto: mx.array | None = None) -> mx.array:
        """x W^T (T, R') for the tile's rows, added to `onto`, which is consumed, if it is given."""
        if not self.columns:
            y = self.quantized(given.x, transpose=True)
            return y if onto is None else onto + y
        for part, column in zip(given.parts, self.columns, strict=True):
            onto = self.products.by_columns(part, column, onto)
        assert onto is not None
        if self.shift is not None:
            arrays = self.products.arrays
            sums = given.group_sums(self.shift.shape[1], arrays)
            onto = arrays.add_matmul(onto, sums, self.shift.T)
        return onto

    def put_product(self, given: Input, whole: mx.array, where: slice) -> None:
        """x W^T (T, R') for the tile's rows, as the columns `where` of a larger array."""
        arrays = self.products.arrays
        if not self.columns:
            arrays.put(whole, (slice(None), where), self.quantized(given.x, transpose=True))
            return
        self.products.put(whole, where, given.parts, self.columns)
        if self.shift is not None:
            sums = given.group_sums(self.shift.shape[1], arrays)
            arrays.add_matmul(whole, sums, self.shift.T, where)

    def quantized(self, x: mx.array, transpose: bool) -> mx.array:
        """x times the tile as it is packed, or its transpose."""
        tile, matrix = self.packed, self.matrix
        assert tile is not None
        dtype, group_size = self.products.packed_dtype, matrix.group_size
        scales, biases = tile.scales.astype(dtype), tile.biases(matrix.bits).astype(dtype)
        if mx.cuda.is_available() and _no_kernel(group_size, scales.shape[1]):
            # contiguous: a single column would be repeated as a view, which no kernel takes
            halves = (mx.contiguous(mx.repeat(one, 2, axis=1)) for one in (scales, biases))
            (scales, biases), group_size = halves, group_size // 2
        return mx.quantized_matmul(
            x.astype(dtype),
            tile.words,
            scales,
            biases,
            transpose=transpose,
            group_size=group_size,
            bits=matrix.bits,
        )


def _no_kernel(group_size: int, groups: int) -> bool:
    """Whether MLX 0.32.4 may have no kernel of NVIDIA GPUs for rows of so many groups.

    In float32 it asks for more shared memory than it reserves where groups have 128 values and
    there are more than 32 tokens. For a single group of 64 or more it compiles a kernel that needs
    headers which only the whole CUDA toolkit has. Two halves of a group are the same values.
    """
    return group_size == 128 or (group_size == 64 and groups == 1)


@dataclass
class RowSum:
    """The running sum over tiles of p_i W_i, (T, C), each term evaluated as it is added."""

    arrays: Arrays
    halves: list[mx.array] = field(default_factory=list)
    whole: mx.array | None = None  # packed products, or the sums of shifts (T, G)

    def add(self, given: Input, tile: ReadyTile, fade: mx.array | None = None) -> None:
        """Scale the sum by `fade` (T, 1), then add the input (T, R') times the tile."""
        if not tile.columns:
            self._add_whole(tile.quantized(given.x, transpose=False), fade)
            self.arrays.settle(self.whole)
            return
        (part,) = given.parts
        if self.halves:
            self._add_to_halves(part, tile, fade)
        else:
            self.halves = [tile.products.by_rows(part, column, None) for column in tile.columns]
        if tile.shift is not None:
            self._add_shifts(given.x, tile.shift, fade)
        self.arrays.settle(self.halves)

    def _add_to_halves(self, part: Factor, tile: ReadyTile, fade: mx.array | None) -> None:
        for column in tile.columns:
            half = self.halves.pop(0)  # leaves no other reference to the array that is added to
            half = half if fade is None else half * fade
            self.halves.append(tile.products.by_rows(part, column, half))
            del half

    def _add_whole(self, term: mx.array, fade: mx.array | None) -> None:
        if self.whole is not None:
            whole = self.whole.astype(mx.float32)
            term = term + (whole if fade is None else whole * fade)
        self.whole = term

    def _add_shifts(self, x: mx.array, shift: mx.array, fade: mx.array | None) -> None:
        if self.whole is None:
            self.whole = self.arrays.matmul(x, shift)
        else:
            whole = self.whole if fade is None else self.whole * fade
            self.whole = self.arrays.add_matmul(whole, x, shift)
        self.arrays.settle(self.whole)

    @property
    def parts(self) -> list[mx.array]:
        """The arrays in which the sum is held so far."""
        return self.halves if self.whole is None else [*self.halves, self.whole]

    def result(self, matrix: Matrix, products: Products) -> mx.array:
        """The sum (T, C) over tiles of such a matrix; the accumulator is consumed."""
        halves, whole = self.halves, self.whole
        self.halves, self.whole = [], None
        if not halves:
            assert whole is not None
            return whole
        total = products.join(halves, matrix.bits)
        if whole is None:
            return total
        return self.arrays.add_groups(total, whole)
