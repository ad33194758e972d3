"""The frozen matrices for kernels: read and dequantized one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays
from runtime.arrays.dequantize import dense
from runtime.arrays.profile import Profile
from runtime.arrays.stored import Matrix
from runtime.arrays.tiles import Input, ReadyTile
from runtime.arrays.values import Move
from runtime.arrays.weight_source import WeightSource

Place = tuple[int, int, int]  # where a matrix begins in weights.bin, and the rows of a tile


@dataclass(frozen=True)
class Matrices:
    """Tiles of matrices, with as many rows as the lowering has decided.

    The keys of `tile_rows` are the offsets of matrices in weights.bin. Dequantized tiles are freed
    after use. With `materialize_blocks` they stay until `release`, so that a whole block is
    dequantized at once, as in the MeBP paper. Those in `materialized` stay for the whole run.
    """

    weights: WeightSource
    arrays: Arrays
    packed: bool
    tile_rows: Mapping[int, int]
    materialize_blocks: bool = False
    profile: Profile = field(default_factory=Profile)
    materialized: dict[Place, ReadyTile] = field(default_factory=dict)
    _of_block: dict[Place, ReadyTile] = field(default_factory=dict)

    def tile(self, matrix: Matrix, start: int, stop: int) -> ReadyTile:
        """Rows start:stop of a matrix, read and dequantized."""
        key = (matrix.packed.offset, start, stop)
        for known in (self._of_block, self.materialized):
            if key in known:
                return known[key]
        ready = self._ready(matrix, start, stop)
        if self.materialize_blocks:
            self._of_block[key] = ready
        return ready

    def input(self, x: mx.array, matrix: Matrix) -> Input:
        """x (T, C) as the matrix's tiles take it, dequantized ones among them if there are any."""
        return Input.of(x, matrix, self.packed and not self.materialized, self.arrays)

    def _ready(self, matrix: Matrix, start: int, stop: int) -> ReadyTile:
        with self.profile.span("read"):
            tile = self.weights.tile(matrix, start, stop)
            self.profile.settle(*tile.arrays)
        with self.profile.span("unpack"):
            ready = ReadyTile.of(tile, matrix, self.packed, self.arrays)
            self.profile.settle(ready.columns)
        return ready

    def materialize(self, chosen: Iterable[Matrix]) -> None:
        """Dequantize whole matrices for the rest of the run.

        The memory of all of them is allocated first, so that it lies together. Allocated one by
        one they would lie between the holes of freed arrays, into which later tiles do not fit.
        """
        places = [(matrix, *rows) for matrix in chosen for rows in self.ranges(matrix)]
        empty = [ReadyTile.empty(matrix, stop - start) for matrix, start, stop in places]
        for (matrix, start, stop), tile in zip(places, empty, strict=True):
            tile.fill(self._ready(matrix, start, stop), self.arrays)
            self.materialized[matrix.packed.offset, start, stop] = tile

    def ranges(self, matrix: Matrix) -> Iterator[tuple[int, int]]:
        """The rows of each tile, in order."""
        step = self.tile_rows[matrix.packed.offset]
        for start in range(0, matrix.rows, step):
            yield start, min(matrix.rows, start + step)

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
                    (values,) = tile.columns
                    seen = replace(tile, columns=(move.tile(matrix, start, values),))
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

    def release(self) -> None:
        """Free the tiles that `materialize_blocks` has left in memory."""
        self._of_block.clear()
