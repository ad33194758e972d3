"""The operation SlicedMlp: an MLP that takes a slice of its width at a time.

The lowering replaces an MLP by it. A slice is so many rows of gate and up and the same columns of
down. Gate and up may be halves of one matrix, or there may be no gate. No value of all tokens and
the whole width exists, and each weight is read and dequantized once in a pass over at most
`MOST_TOKENS` tokens, forward or backward. A backward pass recomputes a slice's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

from runtime.arrays.stored import Matrix
from runtime.operations.base import Call, Function
from runtime.operations.execution import Execution
from runtime.operations.gated import SCRATCH_BYTES, Gated
from runtime.operations.linear import MASK, Linear, Product
from runtime.operations.values import F32, is_parameter

MOST_TOKENS = 512  # at once: with more, reading and dequantizing hardly take less of the time
RANKS = 3  # arrays (T, r): what adapters have of the input, and of the sums over slices


class SlicedMlp(Function, frozen=True):
    """`down` of the activation `gated` of the products `into`; never in a bundle."""

    inputs: tuple[str]
    outputs: tuple[str]
    into: Linear
    gated: Gated
    down: Linear

    runs_once_per_tile: ClassVar[bool] = True
    worth_storing: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "mlp"

    @property
    def _linears(self) -> tuple[Linear, Linear]:
        return self.into, self.down

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(name for linear in self._linears for name in linear.adaptable)

    @property
    def products(self) -> tuple[str, ...]:
        return self.down.products

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(name for linear in self._linears for name in linear.matrices(tensor))

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        own = (tensor(name[1:]) for name in self.gated.inputs if is_parameter(name))
        return (*own, *(name for linear in self._linears for name in linear.vectors(tensor)))

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return self.matrices(tensor)

    def taken(self, name: str, backward: bool, execution: Execution) -> tuple[int, int]:
        return execution.tile_shape(name, backward)

    def products_with_each(self, backward: bool) -> float:
        return 5 / 3 if backward else 1.0  # gate and up are recomputed, down is not

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        return self.outputs if self.learns(adapted) else ()

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(self.inputs)  # from which a slice is recomputed

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The input as tiles take it, what is summed over slices, and one slice's values and tiles.

        Where the inputs of matrices are observed, one lane runs by itself.
        """
        tables, width = execution.tables.matrices, self.width(call.tensor, execution, call.backward)
        (down,) = (tables[name] for name in self.down.matrices(call.tensor))
        matrices = [matrix for _, matrix, _ in self.parts(call.tensor, tables)]
        gate, count = matrices[0], len(matrices)
        tokens = tokens_at_once(call.tokens)
        inputs, value = tokens * gate.columns * F32, tokens * width * F32
        given = execution.rounded_bytes(tokens * gate.columns)
        summed = given + RANKS * tokens * execution.rank * F32
        if tokens < call.tokens:
            summed += tokens * down.rows * F32  # the part of the result
        of_down = tile_most(down, down.rows * width, execution)
        if not call.backward:
            of_gate = max(
                tile_most(matrix, width * matrix.columns, execution) for matrix in matrices
            )
            observed = tokens * down.columns * F32 if call.observed else 0

            def lanes(most: int) -> int:
                products, left = count * most * value, most * value
                activated = products + value + SCRATCH_BYTES
                if self.gated.in_place(execution):  # then the memory of gate and up stays
                    activated, left = products, products
                taken = execution.rounded_bytes(tokens * width)
                multiplied = max(products + of_gate, left + taken + of_down)
                return most * summed + max(activated, multiplied)

            return max(lanes(call.lanes), lanes(1) + observed)
        if call.dropped & set(self.adaptable):
            summed += len(self.into.linears) * tokens * gate.columns * MASK + inputs
        held = sum(execution.tile_bytes(matrix, width * matrix.columns) for matrix in matrices)
        held += max((count + 1) * value + of_down, (2 * count + 1) * value + SCRATCH_BYTES)
        held += execution.rounded_bytes(tokens * (down.rows + width))  # of dy, and of a slice's
        part = inputs if call.wanted and tokens < call.tokens else 0  # of the result
        return summed + held + part

    def parts(
        self, tensor: Callable[[str], str], tables: Mapping[str, Matrix]
    ) -> list[tuple[Product, Matrix, int]]:
        """Gate and up, or the one that there is: product, matrix, and its first row of that."""
        by_output = {product.output: product for product in self.into.linears}
        products = [by_output[name] for name in self.gated.activations]
        (down,) = self.down.matrices(tensor)
        return [
            (product, matrix, first)
            for product in products
            for matrix in [tables[tensor(product.name)]]
            for first in range(0, matrix.rows, tables[down].columns)
        ]

    def width(self, tensor: Callable[[str], str], execution: Execution, backward: bool) -> int:
        """How many columns of its width it takes at once."""
        (name,) = self.down.matrices(tensor)
        return (execution.slice_columns if backward else execution.tile_columns)[name]


def tile_most(matrix: Matrix, values: int, execution: Execution) -> int:
    """The most bytes of so many values of a matrix while they are dequantized, or multiplied."""
    return max(execution.dequantizing_bytes(matrix, values), execution.tile_bytes(matrix, values))


def token_parts(tokens: int) -> list[slice]:
    """The parts of so many tokens that are taken at once, of about one size."""
    step = tokens_at_once(tokens)
    return [slice(start, min(tokens, start + step)) for start in range(0, tokens, step)]


def tokens_at_once(tokens: int) -> int:
    """How many of so many tokens an MLP takes at once."""
    return math.ceil(tokens / math.ceil(tokens / MOST_TOKENS))
