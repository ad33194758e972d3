"""The placed kernel: a serialized graph of some tokens, which takes the position of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.kernel import Run, Tools
from runtime.operations.placed import Placed
from runtime.operations.values import POSITION


@dataclass(frozen=True)
class PlacedKernel:
    """Runs the graph of a `Placed` operation at the position in the value `POSITION`."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Placed)
        for values, lora in zip(lanes, loras, strict=True):
            arguments = [self.tools.argument(run.block, n, values, lora) for n in operation.inputs]
            key = operation.key(run.tokens)
            results = self.tools.graphs.call(key, [*arguments, values[POSITION]])
            del arguments
            made = dict(zip(operation.outputs, results, strict=True))
            del results
            wanted = {name: made[name] for name in run.instruction.wanted}
            del made
            working_bytes = self.tools.graphs.workspace_bytes(key)
            self.tools.arrays.evaluate([*wanted.values()], working_bytes)
            values.update(wanted)

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        raise AssertionError("what decodes is not trained")
