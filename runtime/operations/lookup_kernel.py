"""The lookup kernel: rows of a matrix for tokens whose numbers another operation computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.arrays.values import Gradients, Loras, Values, move_of
from runtime.core.errors import BundleError
from runtime.operations.kernel import Run, Tools
from runtime.operations.lookup import Lookup


@dataclass(frozen=True)
class LookupKernel:
    """Looks up the rows (1, T, C) of the numbers (1, T), which must be those of rows."""

    tools: Tools

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

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        raise AssertionError("what is looked up is not trained")
