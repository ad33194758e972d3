"""Programs: lists of operations over named values; and instructions, the lowered form of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.arrays.stored import Record
from runtime.operations.attention import Attention
from runtime.operations.base import Operation
from runtime.operations.convolution import Convolution
from runtime.operations.elementwise import Elementwise
from runtime.operations.embedding import Embedding, Lookup
from runtime.operations.experts import Experts
from runtime.operations.gated_delta import GatedDelta
from runtime.operations.head import Head
from runtime.operations.linear import Linear
from runtime.operations.values import Shape

StoredOperation = (
    Embedding
    | Lookup
    | Linear
    | Attention
    | Convolution
    | GatedDelta
    | Experts
    | Elementwise
    | Head
)
"""The operations that a bundle may hold; by their tags a manifest is decoded."""


@dataclass(frozen=True)
class Program:
    """Operations from `input` (empty for the embedding) to `output`, and the shapes of values."""

    name: str
    input: str
    output: str
    values: Mapping[str, Shape]
    operations: tuple[Operation, ...]

    @property
    def head(self) -> Operation | None:
        """The last operation if it is a head, which schedules do not run; else None."""
        last = self.operations[-1] if self.operations else None
        return None if last is None or last.in_schedule else last

    def decoding(self, context: int) -> Program:
        """The program that decodes a sequence of at most `context` tokens, with a cache."""
        operations = tuple(operation.decoding(context) for operation in self.operations)
        return replace(self, operations=operations)

    @property
    def cached(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the values that stay from one decoding to the next, by name."""
        return {
            name: shape
            for operation in self.operations
            for name, shape in operation.cached(self.values).items()
        }

    @property
    def borrowed(self) -> Mapping[str, str]:
        """The blocks whose cache it reads, by the names that values have in both."""
        return {
            name: owner
            for operation in self.operations
            for name, owner in operation.borrowed.items()
        }

    @property
    def rewinds(self) -> bool:
        """Whether a sequence that it decodes may go on from one of its last tokens but the last."""
        return all(operation.rewinds for operation in self.operations)


class BlockType(Record, frozen=True):
    """The program that equal blocks share.

    `parameters` are the shapes of the small tensors (norm weights) that elementwise graphs read as
    `@name`.
    """

    name: str
    input: str
    output: str
    values: dict[str, Shape]
    parameters: dict[str, tuple[int, ...]]
    operations: tuple[StoredOperation, ...]

    def program(self, device: str) -> Program:
        """The program as it runs on a device, which has special kernels for some operations."""
        operations = tuple(operation.on_device(device) for operation in self.operations)
        return Program(self.name, self.input, self.output, self.values, operations)


@dataclass(frozen=True)
class Instruction:
    """One operation, run forward or backward.

    `wanted` are the results to compute (forward) or the values to return gradients for (backward);
    `statistics` are the values that a forward computes only for its backward; `frees` are the
    values and gradients that are freed after the instruction. `same` says for each wanted gradient
    which cotangent or earlier gradient is the same array afterwards, or "" for a new array.
    `evaluates` says that all that exists is evaluated after it, where it is one evaluation.
    """

    backward: bool
    operation: Operation
    wanted: tuple[str, ...]
    statistics: tuple[str, ...]
    frees: tuple[str, ...]
    same: tuple[str, ...] = ()
    evaluates: bool = False
