"""The embedding kernel: rows of a matrix, looked up and dequantized, with LoRA.

For the tokens t (T,), with A (V, r), B (r, D) and the gradient dy (T, D) of y:

    y = W[t] + s A[t] B    dA[t] += s dy B^T    dB = s A[t]^T dy
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.values import Gradients, Lora, Loras, Values, move_of
from runtime.core.errors import BundleError
from runtime.operations.embedding import Embedding, Lookup
from runtime.operations.kernel import Kernel, Run

# the values that a block without an input is given, both (T,) integers: tokens, and where in its
# row of text each of them is
TOKENS, POSITIONS = "tokens", "positions"
LOOKED_UP = "looked up"  # the tokens again, for the backward


class EmbeddingKernel(Kernel):
    """Looks up the rows of the tokens in the value `TOKENS`, and of their places: (1, T, D)."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Embedding)
        matrix = self.tools.stored[operation.matrix]
        for values, lora in zip(lanes, loras, strict=True):
            tokens = np.array(values.pop(TOKENS)).astype(np.int64)
            places = np.array(values.pop(POSITIONS)).astype(np.int64) + operation.first_position
            rows = self.tools.matrices.rows(matrix, tokens, move_of(lora))
            if (adapter := lora.get(operation.matrix)) is not None:
                through_a = self._through_a(tokens, adapter)
                rows = mx.addmm(rows, through_a, adapter.b)
            rows = rows[None]
            if operation.positions:
                table = self.tools.stored[operation.positions]
                rows = rows + self.tools.matrices.rows(table, places, move_of(lora))[None]
            self.tools.profile.settle(rows)
            values[operation.outputs[0]] = rows
            if operation.numbers:
                values[operation.numbers] = mx.array(tokens.astype(np.float32).reshape(1, -1, 1))

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        """The adapter's gradients are added in place to those that are there."""
        operation, arrays = run.operation(Embedding), self.tools.arrays
        tokens = np.array(values.pop(LOOKED_UP)).astype(np.int64)
        dy, lora = values.pop(f"~{operation.outputs[0]}").squeeze(0), loras[operation.matrix]
        if operation.matrix not in gradients:
            zeros = mx.zeros(lora.a.shape), mx.zeros(lora.b.shape)
            arrays.settle(zeros)
            gradients[operation.matrix] = zeros
        da, db = gradients[operation.matrix]
        arrays.add_repeated(da, tokens, (dy @ lora.b.T) * lora.scale)
        arrays.add_to(db, ..., self._through_a(tokens, lora).T @ dy)
        return {}

    def _through_a(self, tokens: npt.NDArray[np.int64], lora: Lora) -> mx.array:
        """s A[t] (T, r)."""
        return mx.take(lora.a, mx.array(tokens.astype(np.int32)), axis=0) * lora.scale


class LookupKernel(Kernel):
    """Looks up the rows (1, T, C) of the numbers (1, T), which must be those of rows."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Lookup)
        name = operation.name(run.block.tensor)
        matrix = self.tools.stored[name]
        for values, lora in zip(lanes, loras, strict=True):
            numbers = np.array(values[operation.inputs[0]]).reshape(-1)
            if not ((numbers >= 0) & (numbers < matrix.rows)).all():
                raise BundleError(f"{run.block.label} looks up rows that {name} does not have")
            chosen = numbers.astype(np.int64)
            rows = self.tools.matrices.rows(matrix, chosen, move_of(lora))[None]
            self.tools.arrays.settle(rows)
            values[operation.outputs[0]] = rows
