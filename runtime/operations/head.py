"""The operation Head: the loss over the vocabulary and its gradient, in one pass over W."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.arrays.stored import Matrix, pages
from runtime.operations.base import Call, Scope, require
from runtime.operations.embedding import check_vocabulary
from runtime.operations.execution import Execution, read_bytes
from runtime.operations.linear import split_bytes
from runtime.operations.logits import Logits, bias_of, check_cap
from runtime.operations.values import F32, Shape, T


class Head(Logits, frozen=True):
    """The loss of the logits h W^T, for h (1, T, D), against targets; it ends the last block.

    With `bias` a vector (V,) beside the matrix is added to the logits. With `cap` they are
    cap tanh(logits / cap). LoRA adds s (h A) B to the products h W^T.
    """

    @property
    def adaptable(self) -> tuple[str, ...]:
        return (self.matrix,)

    def decoding(self, context: int) -> Logits:
        """`Logits`, which has no loss."""
        return Logits(self.inputs, self.matrix, self.bias, self.cap)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The hidden states of all lanes with the current one's gradient, and a vocabulary chunk.

        `call.backward` says whether the gradient of the hidden states is computed.
        """
        h = call.bytes_of(self.inputs[0])
        if execution.one_evaluation:
            return self._evaluated_bytes(h, call, execution)
        matrix = execution.tables.matrices[self.matrix]
        gradient = 2 * h if call.backward else 0  # the sum, and the current chunk's
        # h, also as it is multiplied, and the rows of the targets
        waiting = call.lanes * (2 * h + execution.rounded_bytes(h // F32))
        values = execution.chunk_rows * matrix.columns
        dequantizing = execution.dequantizing_bytes(matrix, values)
        scoring = scoring_bytes(matrix, execution)
        if call.backward and self.cap is not None:  # slopes, by which exponentials are multiplied
            scoring += logits_bytes(execution)
        waiting += matrix.rows * F32 if self.bias else 0
        if call.backward:
            scoring += execution.rounded_bytes(logits_bytes(execution) // F32)
        return waiting + gradient + max(dequantizing, scoring)

    def _evaluated_bytes(self, h: int, call: Call, execution: Execution) -> int:
        """Where a chunk is one evaluation of all lanes, none of whose arrays is freed before.

        Of a lane there are h, the rows of its targets, and the sum so far, and in a chunk the
        logits, their exponentials, and the sum faded, the product and both together.
        """
        matrix = execution.tables.matrices[self.matrix]
        share = execution.chunk_rows / matrix.rows
        sums = 3 if call.backward else 0
        logits = pages(logits_bytes(execution))
        small = 8 * pages(call.tokens * F32) + split_bytes(matrix, logits)
        small += pages(execution.rounded_bytes(logits // F32)) if call.backward else 0
        capped = 0 if self.cap is None else 3 + 3 * call.backward  # quotient, tanh, product, ...
        lane = (3 + sums) * pages(h) + (2 + self.bias + capped) * logits + small
        return int(read_bytes(matrix) * share) + call.lanes * lane

    def streamed(self, execution: Execution) -> tuple[int, int]:
        """Bytes of a vocabulary chunk's logits, and of the chunk and its logits together."""
        matrix = execution.tables.matrices[self.matrix]
        logits = logits_bytes(execution)
        return logits, scoring_bytes(matrix, execution) + (0 if self.cap is None else logits)

    def check_weights(self, scope: Scope) -> None:
        check_vocabulary(scope.where, self.matrix, scope.tables)
        (name,) = self.inputs
        stream = (1, T, scope.tables.hidden_size)
        require(scope.values[name] == stream, f"{scope.where}: {name} is not {stream}")
        if self.bias:
            extent = scope.tables.vectors.get(bias_of(self.matrix))
            fits = extent is not None and extent.shape == (scope.tables.vocab_size,)
            require(fits, f"{scope.where}: {bias_of(self.matrix)}")
        check_cap(scope.where, self.cap)

    def describe(self, values: Mapping[str, Shape]) -> str:
        cap = "" if self.cap is None else f" (cap {self.cap:g})"
        return f"head {self.matrix}{cap}"


def logits_bytes(execution: Execution) -> int:
    """Bytes of the logits of one row of tokens over one chunk of the vocabulary."""
    return execution.bucket * execution.chunk_rows * F32


def scoring_bytes(matrix: Matrix, execution: Execution) -> int:
    """Bytes of a chunk of the vocabulary and its logits (exponentials replace the logits)."""
    values = execution.chunk_rows * matrix.columns
    return execution.tile_bytes(matrix, values) + logits_bytes(execution)
