"""The frozen matrices for kernels: read and dequantized one tile of rows, or columns, at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays
from runtime.arrays.compiled_products import CompiledProducts, MapTile
from runtime.arrays.dequantize import dense
from runtime.arrays.packed_rows import Floats, PackedRows
from runtime.arrays.products import Products
from runtime.arrays.profile import Profile
from runtime.arrays.stored import Matrix
from runtime.arrays.stored_codes import Mapped
from runtime.arrays.tile_products import Input, ReadyTile
from runtime.arrays.values import Move
from runtime.arrays.weight_source import WeightSource
from runtime.machine.threads import Team

Place = tuple[int, int, int]  # where a matrix begins in weights.bin, and the part that a tile is


@dataclass(frozen=True)
class Matrices:
    """Tiles of matrices, with as many rows as the lowering has decided, or as many columns.

    The keys of `tile_rows` are the offsets of matrices in weights.bin, and those of `tile_columns`
    the offsets of the matrices whose tiles have all rows; those of `stacked_rows` hold several
    matrices of so many rows, and no tile has rows of two. Dequantized tiles are freed after use,
    but those in `materialized` stay for the whole run. Products are in float32 unless others are
    given; those by `in_place` are with the packed weights in the map, and so are those with tiles
    of `mapped` weights if these are given.
    """

    weights: WeightSource
    arrays: Arrays
    packed: bool
    tile_rows: Mapping[int, int]
    tile_columns: Mapping[int, int] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    materialized: dict[Place, ReadyTile] = field(default_factory=dict)
    other_products: Products | None = None
    in_place: PackedRows | None = None
    stacked_rows: Mapping[int, int] = field(default_factory=dict)
    mapped: Mapped | None = None

    def tile(self, matrix: Matrix, start: int, stop: int) -> ReadyTile:
        """Rows start:stop of a matrix, or columns, read and dequantized."""
        key = (matrix.packed.offset, start, stop)
        if key in self.materialized:
            return self.materialized[key]
        return self.part(matrix, start, stop, self.by_columns(matrix))

    def input(self, x: mx.array, columns: slice | None = None) -> Input:
        """x (T, N), or some of its columns, as products with tiles take it."""
        return Input.of(x, self.products, columns)

    def of_rows(self, x: Floats, chosen: Sequence[Matrix]) -> list[Floats]:
        """x W^T (T, R) for x (T, C) and each of some matrices, by the weights where they lie."""
        assert self.in_place is not None, "the plan multiplies no weights where they lie"
        with self.profile.span("product in place"):
            return self.in_place.multiply(x, chosen)

    @cached_property
    def products(self) -> Products:
        """The products with dequantized tiles."""
        return self.other_products or Products(self.arrays)

    @property
    def team(self) -> Team | None:
        """The threads of compiled code, where it multiplies."""
        products = self.products
        return products.team if isinstance(products, CompiledProducts) else None

    def part(self, matrix: Matrix, start: int, stop: int, by_columns: bool = False) -> ReadyTile:
        """Rows start:stop of a matrix, or columns, read and dequantized anew."""
        if self.mapped is not None and not (self.packed or matrix.is_float):
            with self.profile.span("unpack"):
                values = MapTile(matrix, self.mapped.mapped(matrix, start, stop, by_columns))
                return ReadyTile(matrix, self.products, None, values, None)
        with self.profile.span("read"):
            read = self.weights.columns if by_columns else self.weights.tile
            tile = read(matrix, start, stop)
            self.profile.settle(*tile.arrays)
        with self.profile.span("unpack"):
            ready = ReadyTile.of(tile, matrix, self.packed, self.products)
            self.profile.settle(ready.values)
        return ready

    def materialize(self, chosen: Iterable[Matrix], at_once: int = 0) -> None:
        """Dequantize whole matrices for the rest of the run; packed ones stay packed, in memory.

        The memory of all dequantized ones is allocated first, so that it lies together. Allocated
        one by one they would lie between the holes of freed arrays, into which later tiles do not
        fit. `at_once` are the rows of a tile, if they are not the matrix's own.
        """
        if self.mapped is not None:
            return
        if self.packed:
            for matrix in chosen:
                for start, stop in self.ranges(matrix, at_once):
                    if not matrix.is_float:
                        tile = self.part(matrix, start, stop, self.by_columns(matrix))
                        self.materialized[matrix.packed.offset, start, stop] = tile
            return
        places = [(matrix, *part) for matrix in chosen for part in self.ranges(matrix)]
        empty = []
        for matrix, start, stop in places:
            shape = (stop - start, matrix.columns)
            shape = (matrix.rows, stop - start) if self.by_columns(matrix) else shape
            empty.append(ReadyTile.empty(matrix, *shape, self.products))
        for (matrix, start, stop), tile in zip(places, empty, strict=True):
            tile.fill(self.part(matrix, start, stop, self.by_columns(matrix)), self.arrays)
            self.materialized[matrix.packed.offset, start, stop] = tile

    def by_columns(self, matrix: Matrix) -> bool:
        """Whether tiles of a matrix have all rows, and a range of columns."""
        return matrix.packed.offset in self.tile_columns

    def ranges(self, matrix: Matrix, at_once: int = 0) -> Iterator[tuple[int, int]]:
        """The rows of each tile, or the columns, in order."""
        offset = matrix.packed.offset
        count, step = matrix.rows, at_once or self.tile_rows[offset]
        if self.by_columns(matrix):
            count, step = matrix.columns, self.tile_columns[offset]
        each = self.stacked_rows.get(offset, count)
        for first in range(0, count, each):
            for start in range(first, first + each, step):
                yield start, min(first + each, start + step)

    def taken(self, matrix: Matrix) -> Iterator[tuple[int, int]]:
        """The rows, or columns, that a product takes at once: all, where no tile is in memory."""
        if self.mapped is not None and not (self.packed or matrix.is_float):
            yield 0, matrix.columns if self.by_columns(matrix) else matrix.rows
        else:
            yield from self.ranges(matrix)

    def as_seen(
        self, matrix: Matrix, start: int, stop: int, moves: Sequence[Move | None]
    ) -> Iterator[tuple[ReadyTile, list[int]]]:
        """Rows start:stop as batch lanes see them, each with the lanes that see the same.

        The rows are read and dequantized once, and moved once for each distinct move.
        """
        tile = self.tile(matrix, start, stop)
        for move in dict.fromkeys(moves):
            lanes = [lane for lane, own in enumerate(moves) if own is move]
            seen = tile
            if move is not None:
                with self.profile.span("perturb"):
                    moved = move.tile(matrix, start, tile.values)
                    seen = replace(tile, values=moved)
            yield seen, lanes
            del seen

    def rows(
        self, matrix: Matrix, chosen: npt.NDArray[np.int64], move: Move | None = None
    ) -> mx.array:
        """Chosen rows (N, C) of a matrix as float32, as a batch lane sees them; lazy."""
        values = dense(self.weights.gather(matrix, chosen), matrix.bits, self.arrays)
        return values if move is None else move.rows(matrix, chosen, values)

    def reads(self, matrix: Matrix) -> bool:
        """Whether tiles of a matrix are read, because they do not stay dequantized."""
        return not any(matrix.packed.offset == offset for offset, _, _ in self.materialized)
