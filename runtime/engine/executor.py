"""Running the instructions of lowered programs, forward and reversed.

Invariant: after each instruction its results are evaluated, and the values that it frees are
dropped, so the memory in use is that of the schedule. Where an operation is one evaluation,
all that exists is evaluated after it; where a block is, `runtime.engine.model` does so at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.arrays.arrays import Arrays
from runtime.arrays.profile import Profile
from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.base import Operation
from runtime.operations.kernel import Kernel, Run, Tools
from runtime.operations.kernel_table import KERNELS
from runtime.operations.program import Instruction, Program
from runtime.operations.values import gradient_of


@dataclass(frozen=True)
class Executor:
    """Runs instructions with a kernel for each operation."""

    kernels: dict[type[Operation], Kernel]
    arrays: Arrays
    profile: Profile

    @classmethod
    def of(cls, tools: Tools) -> Executor:
        """An executor with the kernels of the table."""
        kernels = {operation: make(tools) for operation, make in KERNELS.items()}
        return cls(kernels, tools.arrays, tools.profile)

    def forward(
        self,
        block: Block,
        program: Program,
        instructions: Sequence[Instruction],
        tokens: int,
        lanes: list[Values],
        loras: Sequence[Loras],
    ) -> None:
        """Run forward instructions for every batch lane, changing the lanes' values."""
        for instruction in instructions:
            run = Run(block, program, instruction, tokens)
            self._forward(run, lanes, loras)

    def reverse(
        self,
        block: Block,
        program: Program,
        instructions: Sequence[Instruction],
        tokens: int,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> None:
        """Run one lane's backward instructions, adding to the gradients of adapters."""
        for instruction in instructions:
            run = Run(block, program, instruction, tokens)
            if instruction.backward:
                self._backward(run, values, loras, gradients)
            else:
                self._forward(run, [values], [loras])

    def _forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        """Run one operation for every lane; freed values are dropped lane by lane if possible."""
        operation = run.instruction.operation
        kernel = self.kernels[type(operation)]
        with self.profile.span(f"{operation.label} forward"):
            if operation.runs_once_per_tile:
                kernel.forward(run, lanes, loras)
            for index, values in enumerate(lanes):
                if not operation.runs_once_per_tile:
                    kernel.forward(run, [values], loras[index : index + 1])
                for name in run.instruction.frees:
                    values.pop(name, None)
            if run.instruction.evaluates:
                self.arrays.finish(lanes)

    def _backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> None:
        instruction = run.instruction
        operation = instruction.operation
        with self.profile.span(f"{operation.label} backward"):
            returned = self.kernels[type(operation)].backward(run, values, loras, gradients)
            for name, same in zip(instruction.wanted, instruction.same, strict=True):
                gradient = returned.pop(name)
                before = values.pop(gradient_of(name), None)
                if before is not None:
                    gradient = values[same] if same else before + gradient
                values[gradient_of(name)] = gradient
                del gradient, before
            del returned
            self.arrays.evaluate([values[gradient_of(name)] for name in instruction.wanted])
        for name in instruction.frees:
            values.pop(name, None)
        if instruction.evaluates:
            self.arrays.finish(values, gradients)
