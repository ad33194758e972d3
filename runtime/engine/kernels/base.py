"""The interface of kernels, and what a kernel receives to run one instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

from ondevice.bundle.store import Bundle
from ondevice.operations.base import Execution, Operation
from ondevice.operations.program import Block, Program
from runtime.engine.arrays import Arrays
from runtime.engine.graphs import Graphs
from runtime.engine.matrices import Matrices
from runtime.engine.profile import Profile
from runtime.engine.values import Gradients, Loras, Values, move_of
from runtime.lowering.schedule import Instruction
from runtime.storage.weight_source import WeightSource

Observe = Callable[[str, mx.array, mx.array], None]
"""Receives a matrix by full name, its input x (T, C) and the gradient dy (T, R) of its output."""
O = TypeVar("O", bound=Operation)  # noqa: E741


@dataclass(frozen=True)
class Tools:
    """What kernels share: the bundle's tensors and graphs, and the sizes of the lowering.

    `observe` is called before the backward of every product.
    """

    bundle: Bundle
    weights: WeightSource
    matrices: Matrices
    graphs: Graphs
    arrays: Arrays
    execution: Execution
    profile: Profile
    observe: Observe | None = None

    def vector(self, name: str, loras: Loras) -> mx.array:
        """A norm weight or bias, float32, as a batch lane sees it."""
        value, move = self.weights.vector(name), move_of(loras)
        return value if move is None else move.vector(name, value)


class Runs(Protocol):
    """Runs instructions; a kernel calls it for the instructions inside its own."""

    def forward(
        self,
        block: Block,
        program: Program,
        instructions: Sequence[Instruction],
        tokens: int,
        lanes: list[Values],
        loras: Sequence[Loras],
    ) -> None: ...

    def reverse(
        self,
        block: Block,
        program: Program,
        instructions: Sequence[Instruction],
        tokens: int,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> None: ...


@dataclass(frozen=True)
class Run:
    """One instruction of a block's program, for a number of tokens."""

    executor: Runs
    block: Block
    program: Program
    instruction: Instruction
    tokens: int

    def operation(self, of: type[O]) -> O:
        """The instruction's operation, which is of the kernel's own type."""
        found = self.instruction.operation
        assert isinstance(found, of)
        return found


class Kernel(Protocol):
    """Runs one operation, forward and backward, with evaluated results."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        """Compute the wanted results and the statistics, and add them to every lane's values."""

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        """The wanted gradients by value name; those of adapters are added to `gradients`."""
