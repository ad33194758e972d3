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
from runtime.arrays.products import Factor, LowRank, Products
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import QuantizedTile, Tile
from runtime.core.remembered import remembered


@dataclass(frozen=True)
class Input:
    """x (T, N), and what products with dequantized tiles take."""

    x: mx.array
    factor: Factor

    @remembered
    def group_sums(self, groups: int, arrays: Arrays) -> mx.array:
        """Sums of x over each group of columns (T, G), the same for all tiles."""
        return arrays.group_sums(self.x, groups)

    @classmethod
    def of(cls, x: mx.array, products: Products, columns: slice | None = None) -> Input:
        """x, or some of its columns."""
        # contiguous: else every product with a column would make its own copy
        part = x if columns is None else products.arrays.contiguous(x, (slice(None), columns))
        return cls(part, products.factor(part))


@dataclass(frozen=True)
class ReadyTile:
    """A tile of a matrix ready to be multiplied: either still packed, or its values and shift."""

    matrix: Matrix
    products: Products
    packed: QuantizedTile | None
    values: Factor  # none of a packed tile
    shift: mx.array | None

    @classmethod
    def of(cls, tile: Tile, matrix: Matrix, packed: bool, products: Products) -> ReadyTile:
        if packed and isinstance(tile, QuantizedTile):
            return cls(matrix, products, tile, None, None)
        return cls(matrix, products, None, products.dequantize(tile, matrix.bits), tile.shift)

    @classmethod
    def empty(cls, matrix: Matrix, rows: int, width: int, products: Products) -> ReadyTile:
        """A dequantized tile (rows, width) of zeros, evaluated, for `fill`."""
        values, shift = mx.zeros((rows, width), products.dtype), None
        mx.eval(values)
        if matrix.biases is not None:
            shift = mx.zeros((rows, width // matrix.group_size))
            mx.eval(shift)
        return cls(matrix, products, None, values, shift)

    def fill(self, tile: ReadyTile, arrays: Arrays) -> None:
        """Copy the values of a dequantized tile of the same rows."""
        arrays.put(self.values, slice(None), tile.values)
        if self.shift is not None and tile.shift is not None:
            arrays.put(self.shift, slice(None), tile.shift)

    def transposed_product(
        self,
        given: Input,
        onto: mx.array | None = None,
        added: LowRank | None = None,
        to: mx.array | None = None,
    ) -> mx.array:
        """x W^T (T, R') for the tile's rows, with `onto`, which is consumed, and `added`.

        It may be in the memory of `to`.
        """
        if self.packed is not None:
            y = self.quantized(given.x, transpose=True)
            y = y if onto is None else onto + y
            return y if added is None else added.onto(y)
        onto = self.products.multiply(given.factor, self.values, False, onto, added, to)
        if self.shift is not None:
            arrays = self.products.arrays
            sums = given.group_sums(self.shift.shape[1], arrays)
            onto = mx.addmm(onto, sums, self.shift.T)
        return onto

    def put_product(self, given: Input, whole: mx.array, where: slice) -> None:
        """x W^T (T, R') for the tile's rows, as some columns of a larger array."""
        part = self.transposed_product(given)
        self.products.arrays.put(whole, (slice(None), where), part)

    def quantized(self, x: mx.array, transpose: bool) -> mx.array:
        """x times the tile as it is packed, or its transpose."""
        tile, matrix = self.packed, self.matrix
        assert tile is not None
        dtype, group_size = self.products.dtype, matrix.group_size
        scales, biases = tile.scales.astype(dtype), tile.biases(matrix.bits).astype(dtype)
        if mx.cuda.is_available() and _no_kernel(group_size, scales.shape[1]):
            # contiguous: a single column would be repeated as a view, which no kernel takes
            halves = (mx.contiguous(mx.repeat(values, 2, axis=1)) for values in (scales, biases))
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
    total: mx.array | None = None
    shifts: dict[int, mx.array] = field(default_factory=dict)
    """What the shifts of groups add (T, G), by how many groups a row has."""

    def add(
        self,
        given: Input,
        tile: ReadyTile,
        fade: mx.array | None = None,
        added: LowRank | None = None,
        to: mx.array | None = None,
    ) -> None:
        """Scale the sum by `fade` (T, 1), then add input (T, R') times tile, and `added`.

        The first sum may be in the memory of `to`.
        """
        total, self.total = self.total, None  # leaves no other reference to what is added to
        if total is not None and fade is not None:
            total = total * fade
        if tile.packed is not None:
            term = tile.quantized(given.x, transpose=False)
            term = term if total is None else term + total.astype(mx.float32)
            self.total = term if added is None else added.onto(term)
        elif fade is None:
            self.total = tile.products.multiply(given.factor, tile.values, True, total, added, to)
        else:  # small terms would be lost one by one beside the sum over a long vocabulary
            term = tile.products.multiply(given.factor, tile.values, True, None, added, to)
            self.total = term if total is None else total + term
            del term
        del total
        if tile.shift is not None:
            self._add_shifts(given.x, tile.shift, fade)
        self.arrays.settle(self.total)

    def _add_shifts(self, x: mx.array, shift: mx.array, fade: mx.array | None) -> None:
        groups = shift.shape[1]
        before = self.shifts.get(groups)
        if before is None:
            self.shifts[groups] = x @ shift
        else:
            before = before if fade is None else before * fade
            self.shifts[groups] = mx.addmm(before, x, shift)
        self.arrays.settle(self.shifts[groups])

    @property
    def parts(self) -> list[mx.array]:
        """The arrays in which the sum is held so far."""
        return [*([] if self.total is None else [self.total]), *self.shifts.values()]

    def result(self) -> mx.array:
        """The sum (T, C) over all tiles; the accumulator is consumed."""
        total, shifts = self.total, self.shifts
        self.total, self.shifts = None, {}
        assert total is not None
        for of_groups in shifts.values():
            total = self.arrays.add_groups(total, of_groups)
        return total
