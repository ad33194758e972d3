"""Memory-efficient backpropagation: Algorithm 1 of the MeBP paper.

Forward block by block, keeping only each block's input; then the blocks in reverse, each
recomputing what its backward needs. All rows of a micro-batch visit a block together, so a block's
gradients are complete, handed on and dropped before the next block's begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from runtime.activations import Activations
from runtime.adapters import Adapters
from runtime.method import Row, StepLoss, Update
from runtime.program import Gradients, Program


@dataclass(frozen=True)
class MeBP:
    """Exact gradients over a program; `activations` holds a slot per block for each row."""

    program: Program
    adapters: Adapters
    activations: Activations

    def step(self, rows: Sequence[Row], tokens: int, update: Update) -> StepLoss:
        """See `Method.step`."""
        result = self._forward(rows, tokens)
        blocks = self.program.blocks
        for index in range(len(blocks) - 2, 0, -1):
            block = blocks[index]
            loras = self.adapters.loras(block)
            total: Gradients = {}
            for row in range(len(rows)):
                dx, gradients = self.program.backward(
                    block,
                    self.activations.get(index, row),
                    self.activations.get(index + 1, row),
                    loras,
                    input_too=index > 1,
                )
                if dx is not None:
                    self.activations.put(index, row, dx)
                _accumulate(total, gradients)
                del dx, gradients
            self.program.release(block)
            del loras
            update(block, total)
        return result

    def _forward(self, rows: Sequence[Row], tokens: int) -> StepLoss:
        blocks = self.program.blocks
        for row, item in enumerate(rows):
            self.activations.put(1, row, self.program.embed(item.inputs))
        self.program.release(blocks[0])
        for index, block in enumerate(blocks[1:-1], start=1):
            loras = self.adapters.loras(block)
            for row in range(len(rows)):
                x = self.activations.get(index, row)
                self.activations.put(index + 1, row, self.program.forward(block, x, loras))
                del x
            self.program.release(block)
        result = StepLoss(0.0, 0, 0)
        head = len(blocks) - 1
        for row, item in enumerate(rows):
            x = self.activations.get(head, row)
            scored, dx = self.program.head(x, item.targets, item.scored, 1.0 / tokens)
            assert dx is not None
            self.activations.put(head, row, dx)
            result += StepLoss(float(scored.loss.sum().item()), 0, len(item.targets))  # type: ignore[arg-type]
            del x, dx, scored
        self.program.release(blocks[-1])
        return result


def head_loss(loss: mx.array, predicted: mx.array, row: Row) -> StepLoss:
    """Sum up a row's losses (N,) and predictions (N,)."""
    targets = mx.array(row.targets.astype("int32"))
    correct = int((predicted == targets).sum().item())  # type: ignore[arg-type]
    return StepLoss(float(loss.sum().item()), correct, len(row.targets))  # type: ignore[arg-type]


def _accumulate(total: Gradients, fresh: Gradients) -> None:
    for name, (da, db) in fresh.items():
        if name in total:
            da, db = total[name][0] + da, total[name][1] + db
            mx.eval(da, db)
        total[name] = (da, db)


def evaluate(program: Program, adapters: Adapters, rows: Sequence[Row]) -> list[StepLoss]:
    """Loss and accuracy of each row, forward only; rows visit each block together.

    Hidden states of all `rows` are held, so callers pass a few at a time.
    """
    hidden = [program.embed(row.inputs) for row in rows]
    program.release(program.blocks[0])
    for block in program.blocks[1:-1]:
        loras = adapters.loras(block)
        for index in range(len(hidden)):
            hidden[index] = program.forward(block, hidden[index], loras)
        program.release(block)
    results = []
    for x, row in zip(hidden, rows, strict=True):
        scored, _ = program.head(x, row.targets, row.scored, None)
        assert scored.predicted is not None
        results.append(head_loss(scored.loss, scored.predicted, row))
    program.release(program.blocks[-1])
    return results
