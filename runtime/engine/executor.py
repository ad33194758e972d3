"""Running the instructions of lowered programs, forward and reversed.

Invariant: after each instruction its results are evaluated, and the values that it frees are
dropped, so the memory in use is that of the schedule. Where an operation is one evaluation,
all that exists is evaluated after it; where a block is, `runtime.engine.model` does so at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.profile import Profile
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.base import Operation
from runtime.operations.kernel import Kernel, Run, Tools
from runtime.operations.kernel_table import KERNELS
from runtime.operations.program import Instruction
from runtime.operations.row_kernels import ONE_ROW_KERNELS, ROW_KERNELS, RowKernel
from runtime.operations.values import gradient_of
from runtime.plan.lower import LoweredBlock


@dataclass(frozen=True)
class Executor:
    """Runs instructions with a kernel for each operation."""

    kernels: dict[type[Operation], Kernel]
    arrays: Arrays
    profile: Profile
    dtype: mx.Dtype = mx.float32  # of values; kernels that take no other are given float32
    in_place: bool = False  # values may be NumPy's arrays

    @classmethod
    def of(cls, tools: Tools) -> Executor:
        """An executor with the kernels of the table."""
        table, in_place = KERNELS, tools.matrices.in_place is not None
        if in_place:
            table = KERNELS | (ONE_ROW_KERNELS if tools.execution.bucket == 1 else ROW_KERNELS)
        kernels = {operation: make(tools) for operation, make in table.items()}
        return cls(kernels, tools.arrays, tools.profile, tools.dtype, in_place)

    def forward(
        self,
        lowered: LoweredBlock,
        instructions: Sequence[Instruction],
        tokens: int,
        lanes: list[Values],
        loras: Sequence[Loras],
    ) -> None:
        """Run forward instructions for every batch lane, changing the lanes' values."""
        for instruction in instructions:
            run = Run(lowered.block, lowered.program, instruction, tokens)
            self._forward(run, lanes, loras)

    def reverse(
        self,
        lowered: LoweredBlock,
        instructions: Sequence[Instruction],
        tokens: int,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> None:
        """Run one lane's backward instructions, adding to the gradients of adapters."""
        for instruction in instructions:
            run = Run(lowered.block, lowered.program, instruction, tokens)
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
                self._compute(run, kernel, lanes, loras)
            for index, values in enumerate(lanes):
                if not operation.runs_once_per_tile:
                    self._compute(run, kernel, [values], loras[index : index + 1])
                for name in run.instruction.frees:
                    values.pop(name, None)
            if run.instruction.evaluates:
                self.arrays.finish(lanes)

    def _compute(
        self, run: Run, kernel: Kernel, lanes: list[Values], loras: Sequence[Loras]
    ) -> None:
        if isinstance(kernel, RowKernel):  # of float32 values alone
            kernel.forward(run, lanes, loras)
            return
        operation = run.instruction.operation
        given = [self._widened(operation, values, operation.activations) for values in lanes]
        kernel.forward(run, lanes, loras)
        for values, short in zip(lanes, given, strict=True):
            values.update(short)
            self._round(values, run.instruction.wanted)

    def _widened(self, operation: Operation, values: Values, names: Sequence[str]) -> Values:
        """Replace values by float32 ones where the kernel takes no others; returns the old ones."""
        if self.in_place:
            given = {name: values[name] for name in names if name in values}
            values.update({name: mx.array(array) for name, array in given.items()})
        if self.dtype == mx.float32 or operation.any_dtype:
            return {}
        short = {name: values[name] for name in names if name in values}
        values.update({name: value.astype(mx.float32) for name, value in short.items()})
        return short

    def _round(self, values: Values, names: Sequence[str]) -> None:
        """Round results to the type of values."""
        if self.dtype != mx.float32:
            rounded = {name: values[name].astype(self.dtype) for name in names}
            values.update(rounded)
            self.arrays.settle(rounded)

    def _backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> None:
        instruction = run.instruction
        operation = instruction.operation
        with self.profile.span(f"{operation.label} backward"):
            read = (*operation.activations, *operation.results)
            read += tuple(map(gradient_of, operation.results))
            short = self._widened(operation, values, read)
            returned = self.kernels[type(operation)].backward(run, values, loras, gradients)
            values.update({name: value for name, value in short.items() if name in values})
            del short
            for name, same in zip(instruction.wanted, instruction.same, strict=True):
                gradient = returned.pop(name)
                before = values.pop(gradient_of(name), None)
                if before is not None:
                    gradient = values[same] if same else before + gradient
                values[gradient_of(name)] = gradient.astype(self.dtype)
                del gradient, before
            del returned
            self.arrays.evaluate([values[gradient_of(name)] for name in instruction.wanted])
        for name in instruction.frees:
            values.pop(name, None)
        if instruction.evaluates:
            self.arrays.finish(values, gradients)
