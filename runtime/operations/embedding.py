"""The operation Embedding: looks up the rows of a matrix that belong to tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.arrays.stored import pages
from runtime.operations.base import Call, Execution, Operation, Scope, Tables, require
from runtime.operations.values import F32, Shape, T

MOST_ROWS = 1 << 24  # whose numbers float32 has, every one
DEQUANTIZED = 8  # arrays as large as the rows: their words, codes and halves on the way to float32


class Embedding(Operation, frozen=True):
    """Looks up a row of `matrix` (a full name) for each token; the first block begins with it.

    LoRA adds s A[token] B, with A (V, r) and B (r, D). With `positions`, another matrix, it adds
    row `first_position` + p for the p-th token of a row of text. With `numbers` it has another
    result of this name, the tokens' numbers (1, T, 1).
    """

    outputs: tuple[str]
    matrix: str
    positions: str = ""
    first_position: int = 0
    numbers: str = ""

    @property
    def adaptable(self) -> tuple[str, ...]:
        return (self.matrix,)

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        return self.outputs if self.matrix in adapted else ()

    @property
    def only_float32(self) -> str:
        return "the numbers of tokens, which its layers look up" if self.numbers else ""

    @property
    def results(self) -> tuple[str, ...]:
        return (*self.outputs, self.numbers) if self.numbers else self.outputs

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.matrix, self.positions) if self.positions else (self.matrix,)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        if call.backward:  # parts of the adapter's gradient
            return 4 * call.tokens * execution.rank * F32
        tables = 2 if self.positions else 1
        return 3 * tables * call.tokens * execution.tables.matrices[self.matrix].columns * F32

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """The rows as they are stored, and each array on the way from there to float32.

        Backward, which of the distinct tokens each one is, and the adapter's gradient anew.
        """
        if call.backward:
            matrix, rank = execution.tables.matrices[self.matrix], execution.rank
            own = 2 * pages(matrix.rows * rank * F32) + 2 * pages(matrix.columns * rank * F32)
            return own + pages(call.tokens**2 * F32) + 4 * pages(call.tokens * rank * F32)
        tables = 2 if self.positions else 1
        return DEQUANTIZED * tables * pages(call.bytes_of(self.outputs[0]))

    def check_weights(self, scope: Scope) -> None:
        check_vocabulary(scope.where, self.matrix, scope.tables)
        (name,) = self.outputs
        stream = (1, T, scope.tables.hidden_size)
        require(scope.values[name] == stream, f"{scope.where}: {name} is not {stream}")
        if self.numbers:
            fits = scope.values[self.numbers] == (1, T, 1) and scope.tables.vocab_size <= MOST_ROWS
            require(fits, f"{scope.where}: {self.numbers} of {scope.tables.vocab_size} tokens")
        if self.positions:
            self._check_positions(scope.where, scope.tables)

    def _check_positions(self, where: str, tables: Tables) -> None:
        table = tables.matrices.get(self.positions)
        require(table is not None and self.positions != self.matrix, f"{where}: {self.positions}")
        assert table is not None
        fits = table.columns == tables.hidden_size and self.first_position >= 0
        most = max(tables.buckets, default=0)
        fits = fits and most + self.first_position <= table.rows
        require(fits, f"{where}: {self.positions} is ({table.rows}, {table.columns})")

    def describe(self, values: Mapping[str, Shape]) -> str:
        return f"embedding {self.matrix} -> " + "x".join(map(str, values[self.outputs[0]][1:]))


def check_vocabulary(where: str, name: str, tables: Tables) -> None:
    """Check that a matrix has a row of the hidden size for every token."""
    matrix = tables.matrices.get(name)
    expected = (tables.vocab_size, tables.hidden_size)
    shape = matrix and (matrix.rows, matrix.columns)
    require(shape == expected, f"{where}: {name} is {shape}, expected {expected}")
