"""The operation Experts: many gated MLPs side by side, of which each token takes a few.

A router chooses the experts of each token and weighs them, by operations of its own before this
one. The matrices of all experts are stacked, one below the other, in one matrix for gate, one for
up and one for down. An expert that no token has chosen is neither read nor dequantized. The others
run one after another, over a part of their tokens and a slice of their width, so that the memory
does not depend on how tokens are spread over experts: an expert takes at most twice the tokens at
once that it would have if all had the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from runtime.arrays.stored import Matrix, pages
from runtime.operations.base import Call, Function, Scope, require
from runtime.operations.execution import Execution, read_bytes
from runtime.operations.gated import SCRATCH_BYTES
from runtime.operations.sliced_mlp import MOST_TOKENS, tile_most
from runtime.operations.values import F32, Shape, T

LEAST_TOKENS = 64  # at once, if there are so many: for fewer, dequantizing takes most of the time
MOST_NUMBERED = 256  # whose numbers bfloat16 has, every one
ROUTE_BYTES = 64  # of an expert of a token: its number, its place among all, and what sorts them


# as of `Elementwise`; and gpt-oss's, g s(1.702 g) (u + 1) of g at most 7 and u from -7 to 7
Activation = Literal["silu", "gelu_tanh", "clamped"]


class Experts(Function, frozen=True):
    """y = sum over a token's experts e of w_e ((f(x G_e^T + b) * (x U_e^T + c)) D_e^T + d).

    Its inputs are x (1, T, C), the weights w (1, T, k), and the numbers of the chosen experts
    (1, T, k), distinct for each token; its output is y (1, T, D). `gate`, `up` and `down` are
    matrices of `count` experts, relative to the block. With `biased` there are b, c and d, a row
    for each expert, under their names.
    """

    inputs: tuple[str, str, str]
    outputs: tuple[str]
    gate: str
    up: str
    down: str
    count: int
    activation: Activation
    biased: bool = False

    runs_once_per_tile: ClassVar[bool] = True

    @property
    def only_float32(self) -> str:
        return f"the numbers of {self.count} experts" if self.count > MOST_NUMBERED else ""

    @property
    def experts(self) -> int:
        return self.count

    @property
    def products(self) -> tuple[str, ...]:
        return self.outputs

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tensor(self.gate), tensor(self.up), tensor(self.down)

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(f"{name}.bias" for name in self.matrices(tensor)) if self.biased else ()

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(self.inputs)

    @property
    def gradients(self) -> tuple[str, ...]:
        return self.inputs[:2]  # a choice has none

    def of_one(
        self, tensor: Callable[[str], str], matrices: Mapping[str, Matrix], number: int = 0
    ) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up and down of an expert."""
        gate, up, down = (matrices[name].part(number, self.count) for name in self.matrices(tensor))
        return gate, up, down

    def width(self, tensor: Callable[[str], str], execution: Execution) -> int:
        """How many columns of an expert's width it takes at once."""
        return execution.expert_columns[tensor(self.down)]

    def tokens_at_once(self, tokens: int, chosen: int) -> int:
        """How many tokens an expert takes at once, where each of so many chooses so many."""
        share = math.ceil(2 * tokens * chosen / self.count)
        return min(tokens, MOST_TOKENS, max(LEAST_TOKENS, share))

    def taken(self, name: str, backward: bool, execution: Execution) -> tuple[int, int]:
        return execution.tile_shape(name, backward)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """One expert's tokens and results, a slice's values and tiles, biases, and who goes where.

        That is counted for the most tokens that an expert takes at once, as if all went to one.
        """
        gate, up, down = self.of_one(call.tensor, execution.tables.matrices)
        chosen = int(call.values[self.inputs[2]][-1])
        width, tokens = self.width(call.tensor, execution), self.tokens_at_once(call.tokens, chosen)
        inputs, value = tokens * gate.columns * F32, tokens * width * F32
        taken = inputs + execution.rounded_bytes(tokens * gate.columns)
        outputs = tokens * down.rows * F32
        routes = call.tokens * chosen * ROUTE_BYTES
        of_down = tile_most(down, down.rows * width, execution)
        if self.biased:
            routes += self.count * (2 * down.columns + down.rows) * F32
        clamped = 2 * value if self.activation == "clamped" else 0
        if not call.backward:
            of_gate = max(
                tile_most(matrix, width * matrix.columns, execution) for matrix in (gate, up)
            )
            count = call.lanes
            summed = count * (taken + outputs + routes)
            activated = (2 * count + 1) * value + SCRATCH_BYTES + clamped
            multiplied = max(2 * count * value + of_gate, (count + 1) * value + of_down)
            return summed + max(activated, multiplied, 2 * outputs)
        held = sum(execution.tile_bytes(matrix, width * matrix.columns) for matrix in (gate, up))
        held += max(3 * value + of_down, 5 * value + SCRATCH_BYTES + clamped)
        return taken + outputs + routes + inputs + max(held, 3 * inputs)

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """One expert's, of which each is an evaluation: its matrices, and all slices' values."""
        matrices = self.of_one(call.tensor, execution.tables.matrices)
        tokens = self.tokens_at_once(call.tokens, int(call.values[self.inputs[2]][-1]))
        values = 12 * pages(tokens * matrices[2].columns * F32)
        return (
            sum(map(read_bytes, matrices))
            + call.lanes * values
            + 2 * pages(self.working_bytes(call, execution))
        )

    def hole_bytes(self, call: Call, execution: Execution) -> int:
        """A tile of each matrix, and what an expert's tokens take, in every lane.

        Each expert has other numbers of tokens, so the hole that an array has left may be too small
        for the next expert's.
        """
        gate, up, down = self.of_one(call.tensor, execution.tables.matrices)
        width = self.width(call.tensor, execution)
        tiles = sum(width * columns * F32 for columns in (gate.columns, up.columns, down.rows))
        tokens = self.tokens_at_once(call.tokens, int(call.values[self.inputs[2]][-1]))
        return tiles + call.lanes * tokens * (2 * gate.columns + down.rows) * F32

    def check(self, scope: Scope) -> None:
        where = f"{scope.where}: experts"
        named = len(set(self.inputs)) == 3 == len(self.inputs) and len(self.outputs) == 1
        require(named, f"{where}: {self.inputs}, {self.outputs}")
        shapes = [scope.values[name] for name in (*self.inputs, *self.outputs)]
        require(all(s[:2] == (1, T) and len(s) == 3 for s in shapes), f"{where}: {shapes}")
        _, weights, chosen, _ = shapes
        most = weights == chosen and int(chosen[2]) <= self.count
        require(most, f"{where}: {weights} weights of {chosen} experts, of {self.count}")

    def check_weights(self, scope: Scope) -> None:
        matrices = [scope.tables.matrices.get(name) for name in self.matrices(scope.tensor)]
        shapes = [matrix and (matrix.rows, matrix.columns) for matrix in matrices]
        down = matrices[2]
        columns, rows = scope.values[self.inputs[0]][-1], scope.values[self.outputs[0]][-1]
        width = down.columns if down else 0
        wanted = [(self.count * width, columns)] * 2 + [(self.count * int(rows), width)]
        require(
            self.count > 0 and shapes == wanted,
            f"{scope.where}: {scope.tensor(self.gate)}, ... are {shapes}, expected {wanted}",
        )
        biases = [scope.tables.vectors.get(name) for name in self.vectors(scope.tensor)]
        expected = [(self.count, size // self.count) for size, _ in wanted]
        shaped = [bias and bias.shape for bias in biases] == (expected if self.biased else [])
        require(
            shaped, f"{scope.where}: biases of {scope.tensor(self.gate)}, ..., expected {expected}"
        )

    def describe(self, values: Mapping[str, Shape]) -> str:
        chosen, made = values[self.inputs[2]][-1], "x".join(map(str, values[self.outputs[0]][1:]))
        return f"experts, {chosen} of {self.count} -> {made}"
