"""The operation Logits: the scores of all tokens of the vocabulary to follow one token.

The lowering replaces `Head` by it for decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from runtime.operations.base import Call, Operation, require
from runtime.operations.execution import Execution
from runtime.operations.values import F32, HUGE

CHOICE_TILE = 16_384  # tokens whose weights a random choice computes at once, in float64
F64 = 8  # bytes


class Logits(Operation, frozen=True):
    """The logits (V,) of the last token's h (1, T, D), a tile of W at a time; never in a bundle.

    For `bias` and `cap` see `Head`.
    """

    inputs: tuple[str]
    matrix: str
    bias: bool = False
    cap: float | None = None

    in_schedule: ClassVar[bool] = False
    reversible: ClassVar[bool] = False

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def logits_cap(self) -> float | None:
        return self.cap

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.matrix,)

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (bias_of(self.matrix),) if self.bias else ()

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.matrix,)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The hidden state, all logits, and a tile with its own, or a choice."""
        matrix = execution.tables.matrices[self.matrix]
        values = execution.tile_rows[self.matrix] * matrix.columns
        _, multiplied = self.streamed(execution)
        tile = max(execution.dequantizing_bytes(matrix, values), multiplied)
        if execution.in_place:  # the logits as they are multiplied
            tile = matrix.rows * F32
        largest = max(tile, choosing_bytes(matrix.rows))  # of which one comes after the other
        whole = (2 if self.bias else 1) * matrix.rows * F32  # the bias is as large as the logits
        return call.bytes_of(self.inputs[0]) * 2 + whole + largest

    def streamed(self, execution: Execution) -> tuple[int, int]:
        """Bytes of a tile's logits, and of the tile and its logits together."""
        matrix, rows = execution.tables.matrices[self.matrix], execution.tile_rows[self.matrix]
        return rows * F32, execution.tile_bytes(matrix, rows * matrix.columns) + rows * F32


def bias_of(matrix: str) -> str:
    """The name of the bias beside a head's matrix."""
    return f"{matrix}.bias"


def check_cap(where: str, cap: float | None) -> None:
    """Check a cap on logits or scores. Raises BundleError."""
    require(cap is None or 1 / HUGE <= cap <= HUGE, f"{where}: cap {cap}")


def choosing_bytes(vocab_size: int) -> int:
    """Bytes that a random choice takes beside the logits: a copy, marks, and tiles in float64."""
    return vocab_size * (F32 + 2) + 5 * min(vocab_size, CHOICE_TILE) * F64
