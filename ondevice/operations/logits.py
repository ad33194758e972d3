"""The operation Logits: the scores of all tokens of the vocabulary to follow one token.

The lowering replaces `Head` by it for decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ondevice.operations.base import Execution, Operation, Visit
from ondevice.operations.values import F32


class Logits(Operation, frozen=True):
    """h W^T (V,) for the last token's h (1, T, D), a tile of W at a time; never in a bundle."""

    inputs: tuple[str]
    matrix: str

    in_schedule: ClassVar[bool] = False
    reversible: ClassVar[bool] = False

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.matrix,)

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.matrix,)

    def working_bytes(self, visit: Visit, execution: Execution) -> int:
        """The hidden state and its halves, all logits, and a tile with its own."""
        matrix = execution.tables.matrices[self.matrix]
        values = execution.tile_rows[self.matrix] * matrix.columns
        _, multiplied = self.streamed(execution)
        tile = max(execution.dequantizing_bytes(matrix, values), multiplied)
        return visit.bytes_of(self.inputs[0]) * 2 + matrix.rows * F32 + tile

    def streamed(self, execution: Execution) -> tuple[int, int]:
        """Bytes of a tile's logits, and of the tile and its logits together."""
        matrix, rows = execution.tables.matrices[self.matrix], execution.tile_rows[self.matrix]
        return rows * F32, execution.tile_bytes(matrix, rows * matrix.columns) + rows * F32
