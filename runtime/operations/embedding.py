"""The operations Embedding and Lookup: rows of a matrix that belong to tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from runtime.arrays.stored import pages
from runtime.operations.base import Call, Function, Operation, Scope, require
from runtime.operations.execution import Execution, Tables
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


class Lookup(Function, frozen=True):
    """Row i of `matrix` for every token whose number is i: (1, T) -> (1, T, C).

    `matrix` is relative to the block, or the full name of a matrix that another block owns. The
    numbers have no gradient, and the rows are not trained.
    """

    inputs: tuple[str]
    outputs: tuple[str]
    matrix: str
    owned: bool = True

    reversible: ClassVar[bool] = False

    @property
    def chosen_by_tokens(self) -> bool:
        return True

    def name(self, tensor: Callable[[str], str]) -> str:
        """The full name of the matrix."""
        return tensor(self.matrix) if self.owned else self.matrix

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return (self.name(tensor),) if self.owned else ()

    @property
    def borrowed_matrix(self) -> str:
        return "" if self.owned else self.matrix

    def working_bytes(self, call: Call, execution: Execution) -> int:
        matrix = execution.tables.matrices[self.name(call.tensor)]
        return 3 * call.tokens * matrix.columns * F32

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        return DEQUANTIZED * pages(call.bytes_of(self.outputs[0]))

    def check(self, scope: Scope) -> None:
        shapes = [scope.values[name] for name in (*self.inputs, *self.outputs)]
        good = shapes[0] == (1, T) and len(shapes[1]) == 3 and shapes[1][:2] == (1, T)
        require(good, f"{scope.where}: lookup shapes {shapes}")

    def check_weights(self, scope: Scope) -> None:
        name = self.name(scope.tensor)
        matrix = scope.tables.matrices.get(name)
        stored = matrix and (matrix.rows, matrix.columns)
        columns = scope.values[self.outputs[0]][-1]
        fits = matrix is not None and matrix.rows <= MOST_ROWS and matrix.columns == columns
        require(fits, f"{scope.where}: {name} is {stored}, for rows of {columns}")

    def describe(self, values: Mapping[str, Shape]) -> str:
        shape = "x".join(map(str, values[self.outputs[0]][1:]))
        return f"lookup {self.matrix.rpartition('.')[2]} -> {shape}"
