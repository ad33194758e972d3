"""The interface of kernels, and the arguments with which a kernel runs one instruction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import DTYPES, Arrays
from runtime.arrays.matrices import Matrices
from runtime.arrays.profile import Profile
from runtime.arrays.stored import Block, Matrix
from runtime.arrays.values import Gradients, Loras, Values, move_of
from runtime.arrays.weight_source import WeightSource
from runtime.operations.attention import STARTS
from runtime.operations.base import Operation
from runtime.operations.execution import Execution
from runtime.operations.program import Instruction, Program
from runtime.operations.values import is_parameter

O = TypeVar("O", bound=Operation)  # noqa: E741

Starts = npt.NDArray[np.int32]
"""For each token (T,) the position at which its row starts; positions never fall."""


def starts_of(values: Values) -> Starts | None:
    """Where each token's row starts; None in a sequence that is one row.

    MLX made the array of NumPy's values, so nothing is waited for.
    """
    return np.asarray(values[STARTS]) if STARTS in values else None


class Graphs(Protocol):
    """The serialized functions of a bundle, by key."""

    def call(self, key: str, arguments: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """A function's results, lazy.

        Raises:
            BundleError: the file cannot be loaded, or is not what the manifest says.
        """

    def replay(self, key: str, arguments: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """The same of NumPy's arrays, evaluated."""

    def workspace_bytes(self, key: str) -> int:
        """The bytes that a function takes beside its arguments and results while it runs."""


@dataclass(frozen=True)
class Tools:
    """Tools that kernels share: the bundle's tensors and graphs, and the sizes of the lowering.

    `stored` says how each matrix is stored, by full name.
    """

    stored: Mapping[str, Matrix]
    weights: WeightSource
    matrices: Matrices
    graphs: Graphs
    arrays: Arrays
    execution: Execution
    profile: Profile

    @property
    def dtype(self) -> mx.Dtype:
        """The type of a program's values."""
        return DTYPES[self.execution.value_dtype]

    def vector(self, name: str, loras: Loras) -> mx.array:
        """A norm weight or bias, float32, as a batch lane sees it."""
        value, move = self.weights.vector(name), move_of(loras)
        return value if move is None else move.vector(name, value)

    def argument(self, block: Block, name: str, values: Values, loras: Loras) -> mx.array:
        """A value, or the small tensor of a block that an operation reads as `@name`."""
        if is_parameter(name):
            return self.vector(block.tensor(name[1:]), loras)
        return values[name]


@dataclass(frozen=True)
class Run:
    """One instruction of a block's program, for a number of tokens."""

    block: Block
    program: Program
    instruction: Instruction
    tokens: int

    def operation(self, of: type[O]) -> O:
        """The instruction's operation, which is of the kernel's own type."""
        operation = self.instruction.operation
        assert isinstance(operation, of)
        return operation


@dataclass(frozen=True)
class Kernel(ABC):
    """Runs one operation, forward and backward, with evaluated results."""

    tools: Tools

    @abstractmethod
    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        """Compute the wanted results and the statistics, and add them to every lane's values."""

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        """The wanted gradients by value name; those of adapters are added to `gradients`.

        Decoding has none, and neither has looking up by numbers.
        """
        raise AssertionError(f"{run.instruction.operation.label} is not trained")
