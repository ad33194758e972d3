"""How operations run at a sequence bucket: the sizes that the lowering has decided, and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.arrays.attention_scratch import BLOCK
from runtime.arrays.stored import ITEM_BYTES, Extent, Graph, Matrix, pages
from runtime.operations.values import F32

Evaluation = Literal["part", "operation", "block"]
"""The units that are evaluated one after another; all of a unit's arrays are freed when it ends."""


@dataclass(frozen=True)
class Tables:
    """The tensors and graphs of a manifest that operations refer to, by name."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Extent]
    graphs: Mapping[str, Graph]
    buckets: Sequence[int]
    hidden_size: int
    vocab_size: int
    device: str = "cpu"  # that graphs were traced for


@dataclass(frozen=True)
class Execution:
    """How operations run at one sequence bucket: all sizes that the lowering has decided.

    `tile_rows` says how many rows of a matrix are dequantized at once, and `tile_columns` how many
    columns of those that are taken by columns; `slice_columns` says how many columns of its width a
    sliced MLP takes at once backward, by the name of each of its matrices; `expert_columns` is of
    matrices of which an expert at a time is taken. `stacked_rows` says how many rows each of the
    matrices has that are stacked in one: no tile has rows of two. `chunk_rows` says how many rows
    of the vocabulary the head takes at once, `attention_block` how many queries attention takes at
    once. `packed` is the arithmetic of a GPU: products with the quantized words themselves.
    Matrices in floating point are multiplied a tile at a time, on every device. Products are
    computed in `compute_dtype`, "float32" or "bfloat16"; with `in_place` decoded tokens are
    multiplied by the packed weights where they lie in the map, and `compiled` code multiplies all
    tokens by quantized weights there, in so many `threads`.
    """

    tables: Tables
    bucket: int
    tile_rows: Mapping[str, int]
    tile_columns: Mapping[str, int]
    slice_columns: Mapping[str, int]
    expert_columns: Mapping[str, int]
    chunk_rows: int
    attention_block: int
    packed: bool
    prefix: int = 0  # trained keys that every token of every layer sees besides
    rank: int = 0  # of adapters
    evaluation: Evaluation = "part"
    compute_dtype: str = "float32"
    in_place: bool = False
    stacked_rows: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False
    threads: int = 1

    @property
    def tiled(self) -> bool:
        """Whether any matrix is multiplied by tiles: compiled code takes quantized ones only."""
        return not self.compiled or any(each.is_float for each in self.tables.matrices.values())

    @property
    def queries(self) -> int:
        """How many queries attention takes at once: where it is compiled, a block of its own."""
        return BLOCK if self.compiled else self.attention_block

    @property
    def value_dtype(self) -> str:
        """The type of a program's values: on a GPU that of products, which else round copies."""
        return self.compute_dtype if self.tables.device == "gpu" else "float32"

    @property
    def value_bytes(self) -> int:
        """Bytes of a program's value, for each of its numbers."""
        return ITEM_BYTES[self.value_dtype]

    def rounded_bytes(self, values: int) -> int:
        """Bytes of a rounded copy of so many float32 values; 0 if products take float32."""
        return 0 if self.compute_dtype == "float32" else values * ITEM_BYTES[self.compute_dtype]

    @property
    def one_evaluation(self) -> bool:
        """Whether an operation evaluates nothing itself: it is one evaluation, or its block is."""
        return self.evaluation != "part"

    def dequantizing_bytes(self, matrix: Matrix, values: int) -> int:
        """Bytes in memory while a tile of `values` values is dequantized.

        These are the words, the codes of 8 bits, the results, and the scales, twice. Values in
        floating point are in memory beside those of another type into which they are converted.
        """
        values = min(values, matrix.rows * matrix.columns)
        ready = self.tile_bytes(matrix, values)
        if self.compiled and not matrix.is_float:
            return ready
        if self.value_bytes < F32 and not self.packed:  # by way of float32, which heads multiply
            ready += values * F32
        if matrix.is_float:
            dtype = matrix.packed.dtype
            if dtype == self.value_dtype:
                return ready
            by_way_of = values * F32 if self.value_bytes < F32 and dtype != "float32" else 0
            return ready + values * matrix.bits // 8 + by_way_of
        if self.packed:
            return ready
        scales = 2 * _per_group(matrix, values)
        return values * matrix.bits // 8 + scales + values + ready

    def tile_bytes(self, matrix: Matrix, values: int) -> int:
        """Bytes of a tile that can be multiplied: words, scales and biases, or values and shift."""
        if self.packed and not matrix.is_float:
            share = values / (matrix.rows * matrix.columns)
            return int(matrix.nbytes * share) + 2 * _per_group(matrix, values)
        if self.compiled and not matrix.is_float:
            return 0
        added = 0 if matrix.biases is None else _per_group(matrix, values)
        return values * self.value_bytes + added

    def tile_shape(self, name: str, backward: bool) -> tuple[int, int]:
        """The rows and columns of a matrix's tile."""
        matrix, height = self.tables.matrices[name], self.tile_rows[name]
        width = self.expert_columns.get(name, self.tile_columns.get(name, matrix.columns))
        if backward and name in self.slice_columns:
            step = self.slice_columns[name]
            height, width = (height, step) if name in self.tile_columns else (step, width)
        return min(matrix.rows, height), min(matrix.columns, width)

    def largest_tile_bytes(self) -> int:
        """The most bytes that any matrix's tile takes while it is dequantized."""
        return max(
            self.dequantizing_bytes(matrix, math.prod(self.tile_shape(name, backward=False)))
            for name, matrix in self.tables.matrices.items()
        )


def materialized_bytes(matrix: Matrix, dtype: str = "float32") -> int:
    """Bytes of a whole matrix in a type, with the shifts of affine groups."""
    shifts = 0 if matrix.biases is None else matrix.groups * F32
    return matrix.rows * matrix.columns * ITEM_BYTES[dtype] + shifts


def packed_bytes(matrix: Matrix) -> int:
    """Bytes of a whole quantized matrix as it is kept packed, in whole pages; 0 in floating point.

    Scales and shifts are float32.
    """
    if matrix.is_float:
        return 0
    small = (1 if matrix.biases is None else 2) * pages(matrix.groups * F32)
    return pages(matrix.packed.nbytes) + small


def read_bytes(matrix: Matrix) -> int:
    """Bytes of a whole matrix as it is read and multiplied on a GPU, in whole pages.

    Scales and biases exist as they are stored, in float32, and as MLX's products take them.
    """
    if matrix.is_float:
        values = pages(matrix.rows * matrix.columns * F32)
        return values if matrix.bits == 32 else values + pages(matrix.packed.nbytes)
    small = (4 if matrix.biases is None else 8) * pages(matrix.groups * F32)
    return pages(matrix.packed.nbytes) + small


def _per_group(matrix: Matrix, values: int) -> int:
    """Bytes of one float32 for each group among `values` values."""
    return values // matrix.group_size * F32
