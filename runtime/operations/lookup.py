"""The operation Lookup: rows of a matrix that belong to tokens, whose numbers are a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from runtime.arrays.stored import pages
from runtime.operations.base import Call, Execution, Function, Scope, require
from runtime.operations.embedding import DEQUANTIZED, MOST_ROWS
from runtime.operations.values import F32, Shape, T


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
        found = matrix and (matrix.rows, matrix.columns)
        columns = scope.values[self.outputs[0]][-1]
        fits = matrix is not None and matrix.rows <= MOST_ROWS and matrix.columns == columns
        require(fits, f"{scope.where}: {name} is {found}, for rows of {columns}")

    def describe(self, values: Mapping[str, Shape]) -> str:
        shape = "x".join(map(str, values[self.outputs[0]][1:]))
        return f"lookup {self.matrix.rpartition('.')[2]} -> {shape}"
