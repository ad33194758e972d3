"""The dropout of one training step: which values of an adapter's input each row drops.

Masks are keyed by (seed, step, row of the step, tensor) and by the token, so they are the same in
any order of execution, in the recomputed forward pass, and after a run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.arrays.dropout import Dropout
from runtime.arrays.stored import Block
from runtime.arrays.values import Loras
from runtime.methods.noise import number_of


@dataclass(frozen=True)
class StepDropout:
    """The dropout of step `step` (0-based), for rows that are counted from `first_row`."""

    seed: int
    probability: float
    step: int
    first_row: int = 0

    def of_row(self, block: Block, loras: Loras, row: int) -> Loras:
        """The block's adapters, with the dropout of one row."""
        if not self.probability:
            return loras
        return {
            name: replace(lora, dropout=self.of_tensor(block.tensor(name), row))
            for name, lora in loras.items()
        }

    def of_tensor(self, tensor: str, row: int) -> Dropout:
        """The dropout of one matrix's input in one row."""
        key = number_of(self.seed, "dropout", self.step, self.first_row + row, tensor)
        return Dropout(key, self.probability)
