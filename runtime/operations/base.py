"""The base class of operations: the questions of lowering and planner, answered without running.

A new operation is a class in a file of its own, a kernel in a file beside it, and a line in each of
two tables: `runtime.operations.program.StoredOperation` and `runtime.operations.kernel_table`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from runtime.arrays.stored import pages
from runtime.core.errors import BundleError
from runtime.operations.execution import Execution, Tables
from runtime.operations.values import F32, Shape, bytes_at, is_parameter


def require(condition: bool, message: str) -> None:
    """Raise BundleError with this message unless the condition on a manifest holds."""
    if not condition:
        raise BundleError(f"manifest: {message:.1000}")


@dataclass(frozen=True)
class Call:
    """One execution of an operation, for questions about the bytes that it takes.

    wanted: forward the results to compute, backward the values to return gradients for.
    lanes: how many hidden states run together, of `tokens` tokens each.
    tensor: maps the name of a tensor within the block to its full name.
    dropped: the matrices, relative to the block, whose adapters drop values of their input.
    observed: whether all of a matrix's inputs are looked at.
    item_bytes: of a number in the values as the operation's kernel takes them.
    """

    backward: bool
    wanted: tuple[str, ...]
    lanes: int
    tokens: int
    values: Mapping[str, Shape]
    tensor: Callable[[str], str]
    dropped: frozenset[str] = frozenset()
    observed: bool = False
    item_bytes: int = F32

    def bytes_of(self, name: str) -> int:
        """The bytes of a value for the tokens of this call."""
        return bytes_at(self.values[name], self.tokens, self.item_bytes)


@dataclass(frozen=True)
class Scope:
    """Where an operation is checked: the values, parameters and tables that it may name.

    where: its place, for messages. tensor: maps the name of a tensor within the block to its full
    name; only a block has one.
    """

    where: str
    values: Mapping[str, Shape]
    parameters: Mapping[str, tuple[int, ...]]
    tables: Tables
    tensor: Callable[[str], str] = str


class Operation(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="op",
    tag=str.lower,
):
    """One operation of a program, over values that have names.

    Inputs that begin with `@` are parameters: small tensors of the weights file.
    """

    runs_once_per_tile: ClassVar[bool] = False
    """Whether it runs once for all batch lanes, so that each tile of weights is loaded once."""
    in_schedule: ClassVar[bool] = True
    """Whether schedules run it; the head is False, since it runs separately after its block."""
    reversible: ClassVar[bool] = True
    """Whether schedules run its backward."""
    takes_parameters: ClassVar[bool] = False
    """Whether inputs may be parameters."""
    rewinds: ClassVar[bool] = True
    """Whether what it keeps while it decodes tells what preceded any of the last tokens."""
    cheap: ClassVar[bool] = False
    """Whether recomputing its results where they are read costs next to nothing."""
    worth_storing: ClassVar[bool] = False
    """Whether results that its block's backward reads go to a file instead of being recomputed."""
    by_queries: ClassVar[bool] = False
    """Whether it takes a block of queries at a time."""
    any_dtype: ClassVar[bool] = False
    """Whether its kernel takes values of bfloat16; others are given copies in float32."""

    def __post_init__(self) -> None:
        """Check that its class has written all that belongs together. Raises TypeError."""
        own = type(self)
        needed = ["working_bytes"]
        if own.statistics is not Operation.statistics:
            needed.append("statistic_bytes")
        if own.prefixable is not Operation.prefixable:
            needed.append("prefix_widths")
        for name in needed:
            if getattr(own, name) is getattr(Operation, name):
                raise TypeError(f"the operation {own.__name__} has no {name}")

    @property
    def experts(self) -> int:
        """How many experts its matrices hold, one below the other; 0 if they hold none.

        Those that tokens choose are read when they are needed, and none stay dequantized.
        """
        return 0

    @property
    def chosen_by_tokens(self) -> bool:
        """Whether tokens choose which parts of its matrices are read."""
        return self.experts > 0

    @property
    def only_float32(self) -> str:
        """What in its values bfloat16 cannot hold; empty if nothing."""
        return ""

    @property
    def label(self) -> str:
        """Its name in profiles and descriptions."""
        return type(self).__name__.lower()

    @property
    def inputs_read(self) -> tuple[str, ...]:
        """All inputs: values and parameters."""
        return ()

    @property
    def results(self) -> tuple[str, ...]:
        """The values that it computes."""
        return ()

    @property
    def activations(self) -> tuple[str, ...]:
        """The inputs that are values."""
        return tuple(name for name in self.inputs_read if not is_parameter(name))

    @property
    def products(self) -> tuple[str, ...]:
        """The results that are products with frozen matrices."""
        return ()

    def taken(self, name: str, backward: bool, execution: Execution) -> tuple[int, int]:
        """The rows and columns of a matrix that one of its products takes, by full name."""
        matrix = execution.tables.matrices[name]
        if execution.compiled and not matrix.is_float:
            return matrix.rows, matrix.columns
        return execution.tile_shape(name, backward=False)

    def products_with_each(self, backward: bool) -> float:
        """How many products with each of its matrices it computes, on average."""
        return 1.0

    @property
    def statistics(self) -> tuple[str, ...]:
        """Further values that the forward computes if a backward will follow."""
        return ()

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The matrices that LoRA may adapt, relative to the block."""
        return ()

    @property
    def prefixable(self) -> tuple[str, ...]:
        """The attentions that may have a prefix of trained keys, relative to the block."""
        return ()

    def prefix_widths(self, values: Mapping[str, Shape]) -> tuple[int, int]:
        """How many values a key and a value of its prefix have, over all heads."""
        return 0, 0

    @property
    def graph(self) -> str:
        """The elementwise graph that it runs; empty for none."""
        return ""

    def on_device(self, device: str) -> Operation:
        """The operation that runs in its place on "cpu" or "gpu"."""
        return self

    def decoding(self, context: int) -> Operation:
        """The operation that runs in its place where a sequence of `context` tokens is decoded."""
        return self

    def cached(self, values: Mapping[str, Shape]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the float32 values that it keeps from one decoding to the next, by name."""
        return {}

    @property
    def cache_of(self) -> str:
        """The earlier block whose past keys and values it reads; empty for its own."""
        return ""

    @property
    def borrowed(self) -> Mapping[str, str]:
        """The blocks that own what it reads of a cache and does not keep itself, by name."""
        return {}

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        """Full names of the matrices that it reads."""
        return ()

    @property
    def borrowed_matrix(self) -> str:
        """The full name of a matrix of another block that it looks tokens up in; empty if none."""
        return ""

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        """Full names of the vectors that it reads, besides parameters."""
        return ()

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        """Full names of the matrices that it dequantizes completely, one tile after another."""
        return ()

    @property
    def logits_cap(self) -> float | None:
        """The cap of its logits, where it has any."""
        return None

    def learns(self, adapted: frozenset[str]) -> bool:
        """Whether any of its matrices has an adapter, given the adapted names."""
        return any(name in adapted for name in (*self.adaptable, *self.prefixable))

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        """The results that depend on an adapter of this operation."""
        return ()

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        """The values of the forward pass that its backward reads."""
        return frozenset()

    @property
    def gradients(self) -> tuple[str, ...]:
        """The values that its backward returns gradients for, in order."""
        return self.activations

    @property
    def shared_gradients(self) -> tuple[str, ...]:
        """For each gradient the cotangent or earlier gradient that is the same array, or "".

        Empty if every gradient is a new array.
        """
        return ()

    def statistic_bytes(self, name: str, call: Call) -> int:
        """The bytes of one of its `statistics`."""
        return 0

    @abstractmethod
    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The bytes that it needs while it runs, besides the values that it reads and computes."""

    def views(self, execution: Execution) -> Mapping[str, str]:
        """The results of its forward that are an input's memory, each with that input."""
        return {}

    def widened(self, backward: bool) -> tuple[str, ...]:
        """The values, and their gradients, of which float32 copies exist if they are bfloat16.

        A kernel that takes any type makes some of them itself.
        """
        names = (*self.activations, *self.results)
        return names * 2 if backward else names

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """The bytes that it allocates besides its results, where nothing is freed before the end.

        Each buffer has whole pages.
        """
        return pages(self.working_bytes(call, execution))

    def hole_bytes(self, call: Call, execution: Execution) -> int:
        """Unused bytes of a heap, besides those of any operation, since its arrays vary in size."""
        return 0

    def hole_beside_kept(self, call: Call) -> int:
        """Unused bytes of a heap besides, where values are kept for its backward."""
        return 0

    def packed_rows(self, values: Mapping[str, Shape], execution: Execution) -> int:
        """The rows of the factor that a BLAS packs, if there may be more of them than tokens."""
        return 0

    def streamed(self, execution: Execution) -> tuple[int, int]:
        """If it streams a matrix: bytes of a chunk's result, and of chunk and result together."""
        return 0, 0

    def graph_keys(self, bucket: int, backward: bool) -> tuple[str, ...]:
        """The keys of the serialized functions that it runs at a sequence bucket."""
        return ()

    def check(self, scope: Scope) -> None:
        """Check its fields and shapes. Raises BundleError."""

    def check_weights(self, scope: Scope) -> None:
        """Check the tensors that it uses in one block. Raises BundleError."""

    def describe(self, values: Mapping[str, Shape]) -> str:
        """One line that describes it to people."""
        made = ", ".join("x".join(map(str, values[name][1:])) for name in self.results)
        return self.label + (f" -> {made}" if made else "")


class Function(Operation, frozen=True):
    """An operation whose fields list the values that it reads and those that it computes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[str, ...]:
        return self.outputs
