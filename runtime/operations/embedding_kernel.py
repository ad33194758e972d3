"""The embedding kernel: rows of a matrix, looked up and dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from runtime.arrays.values import Gradients, Loras, Values, move_of
from runtime.operations.embedding import Embedding
from runtime.operations.kernel import Run, Tools

# the values that a block without an input is given, both (T,) integers: tokens, and where in its
# row of text each of them is
TOKENS, POSITIONS = "tokens", "positions"


@dataclass(frozen=True)
class EmbeddingKernel:
    """Looks up the rows of the tokens in the value `TOKENS`, and of their places: (1, T, D)."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Embedding)
        matrix = self.tools.stored[operation.matrix]
        for values, lora in zip(lanes, loras, strict=True):
            tokens = np.array(values.pop(TOKENS)).astype(np.int64)
            places = np.array(values.pop(POSITIONS)).astype(np.int64) + operation.first_position
            rows = self.tools.matrices.rows(matrix, tokens, move_of(lora))[None]
            if operation.positions:
                table = self.tools.stored[operation.positions]
                rows = rows + self.tools.matrices.rows(table, places, move_of(lora))[None]
            self.tools.profile.settle(rows)
            values[operation.outputs[0]] = rows
            if operation.numbers:
                values[operation.numbers] = mx.array(tokens.astype(np.float32).reshape(1, -1, 1))

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        raise AssertionError("an embedding is not trained")
