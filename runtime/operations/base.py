"""The base class of operations: the questions of lowering and planner, answered without running.

A new operation is a class in a file of its own, a kernel in a file beside it, and a line in each of
two tables: `runtime.operations.program.StoredOperation` and `runtime.operations.kernel_table`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from runtime.arrays.stored import ITEM_BYTES, Extent, Graph, Matrix, pages
from runtime.core.errors import BundleError
from runtime.operations.values import F32, Shape, bytes_at, is_parameter

Evaluation = Literal["part", "operation", "block"]
"""The units that are evaluated one after another; all of a unit's arrays are freed when it ends."""


def require(condition: bool, message: str) -> None:
    """Raise BundleError with this message unless the condition on a manifest holds."""
    if not condition:
        raise BundleError(f"manifest: {message:.1000}")


@dataclass(frozen=True)
class Tables:
    """The tensors and graphs of a manifest that operations refer to, by name."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Extent]
    graphs: Mapping[str, Graph]
    buckets: Sequence[int]
    hidden_size: int
    vocab_size: int
    device: str = "cpu"  # that graphs were traced for


@dataclass(frozen=True)
class Execution:
    """How operations run at one sequence bucket: all sizes that the lowering has decided.

    `tile_rows` says how many rows of a matrix are dequantized at once, and `tile_columns` how many
    columns of those that are taken by columns; `slice_columns` says how many columns of its width a
    sliced MLP takes at once backward, by the name of each of its matrices; `expert_columns` is of
    matrices of which an expert at a time is taken. `stacked_rows` says how many rows each of the
    matrices has that are stacked in one: no tile has rows of two. `chunk_rows` says how many rows
    of the vocabulary the head takes at once, `attention_block` how many queries attention takes at
    once. `packed` is the arithmetic of a GPU: products with the quantized words themselves.
    Matrices in floating point are multiplied a tile at a time, on every device. Products are
    computed in `compute_dtype`, "float32" or "bfloat16"; with `in_place` decoded tokens are
    multiplied by the packed weights where they lie in the map.
    """

    tables: Tables
    bucket: int
    tile_rows: Mapping[str, int]
    tile_columns: Mapping[str, int]
    slice_columns: Mapping[str, int]
    expert_columns: Mapping[str, int]
    chunk_rows: int
    attention_block: int
    packed: bool
    prefix: int = 0  # trained keys that every token of every layer sees besides
    rank: int = 0  # of adapters
    evaluation: Evaluation = "part"
    compute_dtype: str = "float32"
    in_place: bool = False
    stacked_rows: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False

    @property
    def by_onednn(self) -> bool:
        """Whether that library computes products: in bfloat16 on a CPU."""
        return self.compute_dtype == "bfloat16" and self.tables.device == "cpu"

    @property
    def in_map(self) -> bool:
        """Whether compiled code multiplies quantized tiles where they lie in the map."""
        return self.compiled and self.compute_dtype == "float32"

    @property
    def value_dtype(self) -> str:
        """The type of a program's values: on a GPU that of products, which else round copies."""
        return self.compute_dtype if self.tables.device == "gpu" else "float32"

    @property
    def value_bytes(self) -> int:
        """Bytes of a program's value, for each of its numbers."""
        return ITEM_BYTES[self.value_dtype]

    @property
    def factor_bytes(self) -> int:
        """Bytes of a value as a product takes it."""
        return ITEM_BYTES[self.compute_dtype]

    def rounded_bytes(self, values: int) -> int:
        """Bytes of a rounded copy of so many float32 values; 0 if products take float32."""
        return 0 if self.compute_dtype == "float32" else values * self.factor_bytes

    @property
    def one_evaluation(self) -> bool:
        """Whether an operation evaluates nothing itself: it is one evaluation, or its block is."""
        return self.evaluation != "part"

    def dequantizing_bytes(self, matrix: Matrix, values: int) -> int:
        """Bytes in memory while a tile of `values` values is dequantized.

        These are the words, the codes of 8 bits, the results, and the scales, twice. Values in
        floating point are in memory beside those of another type into which they are converted.
        """
        values = min(values, matrix.rows * matrix.columns)
        ready = self.tile_bytes(matrix, values)
        if self.in_map and not matrix.is_float:
            return ready
        if self.value_bytes < F32 and not self.packed:  # by way of float32, which heads multiply
            ready += values * F32
        if matrix.is_float:
            dtype = matrix.packed.dtype
            if dtype == self.compute_dtype:
                return ready
            by_way_of = values * F32 if self.rounded_bytes(1) and dtype != "float32" else 0
            return ready + values * matrix.bits // 8 + by_way_of
        if self.packed or self.compiled:
            return ready
        scales = 2 * _per_group(matrix, values)
        return values * matrix.bits // 8 + scales + values + ready

    def tile_bytes(self, matrix: Matrix, values: int) -> int:
        """Bytes of a tile that can be multiplied: words, scales and biases, or values and shift."""
        if self.packed and not matrix.is_float:
            share = values / (matrix.rows * matrix.columns)
            return int(matrix.nbytes * share) + 2 * _per_group(matrix, values)
        if self.in_map and not matrix.is_float:
            return 0
        added = 0 if matrix.biases is None else _per_group(matrix, values)
        return values * self.factor_bytes + added

    def tile_shape(self, name: str, backward: bool) -> tuple[int, int]:
        """The rows and columns of a matrix's tile."""
        matrix, height = self.tables.matrices[name], self.tile_rows[name]
        width = self.expert_columns.get(name, self.tile_columns.get(name, matrix.columns))
        if backward and name in self.slice_columns:
            step = self.slice_columns[name]
            height, width = (height, step) if name in self.tile_columns else (step, width)
        return min(matrix.rows, height), min(matrix.columns, width)

    def largest_tile_bytes(self) -> int:
        """The most bytes that any matrix's tile takes while it is dequantized."""
        return max(
            self.dequantizing_bytes(matrix, math.prod(self.tile_shape(name, backward=False)))
            for name, matrix in self.tables.matrices.items()
        )


def materialized_bytes(matrix: Matrix, compute_dtype: str = "float32") -> int:
    """Bytes of a whole matrix as products take it, with the shifts of affine groups."""
    shifts = 0 if matrix.biases is None else matrix.groups * F32
    return matrix.rows * matrix.columns * ITEM_BYTES[compute_dtype] + shifts


def packed_bytes(matrix: Matrix) -> int:
    """Bytes of a whole quantized matrix as it is kept packed, in whole pages; 0 in floating point.

    Scales and shifts are float32.
    """
    if matrix.is_float:
        return 0
    small = (1 if matrix.biases is None else 2) * pages(matrix.groups * F32)
    return pages(matrix.packed.nbytes) + small


def read_bytes(matrix: Matrix) -> int:
    """Bytes of a whole matrix as it is read and multiplied on a GPU, in whole pages.

    Scales and biases exist as they are stored, in float32, and as MLX's products take them.
    """
    if matrix.is_float:
        values = pages(matrix.rows * matrix.columns * F32)
        return values if matrix.bits == 32 else values + pages(matrix.packed.nbytes)
    small = (4 if matrix.biases is None else 8) * pages(matrix.groups * F32)
    return pages(matrix.packed.nbytes) + small


def _per_group(matrix: Matrix, values: int) -> int:
    """Bytes of one float32 for each group among `values` values."""
    return values // matrix.group_size * F32


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
