"""The operation Linear: products of one value with frozen matrices, with LoRA and bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from runtime.arrays.stored import Matrix, Record, pages
from runtime.operations.base import Call, Operation, Scope, require
from runtime.operations.execution import Execution, read_bytes
from runtime.operations.values import F32, Shape, T

MASK = 1  # bytes of a value's entry in a mask
DROPPING = 6  # arrays as large as the input: its random words, their views, the mask and products
SPLIT_BYTES = 512 * 32 * 32 * F32  # the most that a GPU's split quantized product holds besides
SPLIT_COLUMNS = 32  # the fewest columns of a part
GEMM_PARTS = 16  # the most parts of another split product


class Product(Record, frozen=True):
    """One product: `output` = input times the matrix `name`, which is relative to the block."""

    name: str
    output: str
    bias: bool


class Linear(Operation, frozen=True):
    """y = x W^T (+ b) (+ LoRA) for one or several matrices W that read the same x (1, T, C).

    `frozen` matrices have no LoRA: nothing that is trained comes before them.
    """

    inputs: tuple[str]
    linears: tuple[Product, ...]
    frozen: bool = False

    runs_once_per_tile: ClassVar[bool] = True
    any_dtype: ClassVar[bool] = True

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(linear.output for linear in self.linears)

    @property
    def products(self) -> tuple[str, ...]:
        return self.results

    @property
    def adaptable(self) -> tuple[str, ...]:
        return () if self.frozen else tuple(linear.name for linear in self.linears)

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(tensor(linear.name) for linear in self.linears)

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(f"{tensor(linear.name)}.bias" for linear in self.linears if linear.bias)

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return self.matrices(tensor)

    def widened(self, backward: bool) -> tuple[str, ...]:
        """Of gradients of adapters, which are products of the input and of the output's."""
        return (*self.inputs, *self.results) if backward else ()

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        return tuple(linear.output for linear in self.linears if linear.name in adapted)

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(self.inputs if self.learns(adapted) else ())

    def working_bytes(self, call: Call, execution: Execution) -> int:
        chosen = [
            linear for linear in self.linears if call.backward or linear.output in call.wanted
        ]
        tables, tensor = execution.tables, call.tensor
        if call.backward:
            columns = tables.matrices[tensor(chosen[0].name)].columns
            summed = call.tokens * columns * F32 if len(chosen) > 1 else 0
            return summed + max(_backward(linear.name, call, execution) for linear in chosen)
        return max(_forward(linear.name, call, execution) for linear in chosen)

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """The weights as they are read, and every array between input and output, of all lanes."""
        return sum(
            _allocated(linear, call, execution)
            for linear in self.linears
            if call.backward or linear.output in call.wanted
        )

    def check(self, scope: Scope) -> None:
        require(len(self.inputs) == 1 and bool(self.linears), f"{scope.where}: linear operation")
        shapes = [scope.values[name] for name in (*self.inputs, *self.results)]
        require(all(s[:2] == (1, T) and len(s) == 3 for s in shapes), f"{scope.where}: {shapes}")

    def check_weights(self, scope: Scope) -> None:
        for linear in self.linears:
            name = scope.tensor(linear.name)
            matrix = scope.tables.matrices.get(name)
            wanted = (scope.values[linear.output][-1], scope.values[self.inputs[0]][-1])
            shape = matrix and (matrix.rows, matrix.columns)
            require(shape == wanted, f"{scope.where}: {name} is {shape}, expected {wanted}")
            bias = scope.tables.vectors.get(f"{name}.bias")
            if linear.bias:
                require(
                    bias is not None and bias.shape == wanted[:1], f"{scope.where}: {name}.bias"
                )

    def describe(self, values: Mapping[str, Shape]) -> str:
        names = ", ".join(linear.name.split(".")[-1] for linear in self.linears)
        shapes = ", ".join("x".join(map(str, values[name][1:])) for name in self.results)
        return f"linear {names} -> {shapes}"


def _forward(relative: str, call: Call, execution: Execution) -> int:
    """Bytes of the rounded inputs, and of a tile while it is dequantized or multiplied.

    After that, or if larger, those of an input with values dropped, and its mask. Where weights are
    multiplied where they lie, there are no tiles.
    """
    name = call.tensor(relative)
    matrix, rows = execution.tables.matrices[name], execution.tile_rows[name]
    inputs = call.tokens * matrix.columns
    dropped = inputs * (MASK + F32) if relative in call.dropped else 0
    if name in execution.tile_columns:  # one lane's part of the input at a time
        width = execution.tile_columns[name]
        part = call.tokens * width * F32 + execution.rounded_bytes(call.tokens * width)  # copied
        return max(part + execution.dequantizing_bytes(matrix, matrix.rows * width), dropped)
    if execution.in_place:
        return 2 * inputs * F32  # the input in order, and for 4 bits again
    values = rows * matrix.columns
    multiplied = _part(matrix, rows, call.tokens) + execution.tile_bytes(matrix, values)
    tile = max(execution.dequantizing_bytes(matrix, values), multiplied)
    return max(execution.rounded_bytes(call.lanes * inputs) + tile, dropped)


def _backward(relative: str, call: Call, execution: Execution) -> int:
    """Bytes of a tile and its part of dy, also rounded.

    With dropout also those of the mask, or if larger, of the adapter's part of dx.
    """
    name = call.tensor(relative)
    matrix, rows = execution.tables.matrices[name], execution.tile_rows[name]
    inputs = call.tokens * matrix.columns
    if name in execution.tile_columns:
        width = execution.tile_columns[name]
        part = call.tokens * width * F32
        part += execution.rounded_bytes(call.tokens * matrix.rows)
        most = part + execution.dequantizing_bytes(matrix, matrix.rows * width)
        return most + inputs * MASK if relative in call.dropped else most
    tile = execution.dequantizing_bytes(matrix, rows * matrix.columns)
    taken = matrix.rows if execution.compiled and not matrix.is_float else rows
    tile += execution.rounded_bytes(call.tokens * taken)
    most = tile + _part(matrix, rows, call.tokens)
    return max(most, inputs * F32) + inputs * MASK if relative in call.dropped else most


def _allocated(linear: Product, call: Call, execution: Execution) -> int:
    """Bytes that the product with one matrix allocates, forward or backward.

    Besides the weights, forward: the product before the adapter's part is added, and a copy of an
    input that is not contiguous. Backward: the same of dx and dy, and the sum of several dx. Either
    way the products with A and B, both in float32 and as they are multiplied, and what a GPU holds
    where it splits a product to compute its parts side by side.
    """
    matrix = execution.tables.matrices[call.tensor(linear.name)]
    inputs = pages(call.tokens * matrix.columns * call.item_bytes)
    outputs = pages(call.tokens * matrix.rows * call.item_bytes)
    ranks = pages(call.tokens * execution.rank * F32)
    a, b = (pages(n * execution.rank * F32) for n in (matrix.columns, matrix.rows))
    lane = 4 * ranks + 2 * (a + b)
    if call.backward:
        lane += 2 * inputs + outputs + GEMM_PARTS * (2 * ranks + a + b)
    else:
        lane += outputs + inputs + GEMM_PARTS * ranks + split_bytes(matrix, outputs)
    if linear.name in call.dropped:
        lane += DROPPING * inputs
    return read_bytes(matrix) + call.lanes * lane


def split_bytes(matrix: Matrix, outputs: int) -> int:
    """Bytes of the parts of a quantized product's `outputs`, which a GPU splits where it is small.

    There are at least two, and one for each group of columns at most.
    """
    if matrix.is_float or 2 * outputs > SPLIT_BYTES:
        return 0
    return min(SPLIT_BYTES, outputs * (matrix.columns // SPLIT_COLUMNS))


def _part(matrix: Matrix, rows: int, tokens: int) -> int:
    """Bytes of the part of y or dy for `rows` rows; 0 if these are all rows, without a copy."""
    return tokens * rows * F32 if rows < matrix.rows else 0
