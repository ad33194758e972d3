"""Lowering: turns the programs of a bundle into instructions for one sequence bucket.

All that is decided before anything runs is decided here: tiles of weights, slices of MLPs, the
order of instructions, when values are freed, and which are recomputed. The planner adds up this
result, the engine runs it, and neither decides anything again. Pure: no MLX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from runtime.arrays.stored import Block
from runtime.bundle.manifest import Manifest
from runtime.operations.base import Operation
from runtime.operations.execution import Evaluation, Execution
from runtime.operations.experts import Experts
from runtime.operations.program import Instruction, Program
from runtime.operations.sliced_mlp import SlicedMlp
from runtime.operations.values import DECODED_TOKENS, F32
from runtime.plan.operation_order import (
    backward_schedule,
    forward_schedule,
    keeping_schedule,
    kept_values,
    stored_values,
)
from runtime.plan.slices import fold, width_of

LEAST_CHUNK_ROWS = 64  # the fewest rows of the vocabulary in a chunk
MOST_CHUNKS = 8  # of the vocabulary, where each is one evaluation


@dataclass(frozen=True)
class Sizes:
    """The sizes that a plan chooses among, from generous to frugal.

    `tile_values` bounds the values of a matrix that are dequantized at once, `attention_block` the
    queries whose attention scores exist at once. With `slices`, an MLP takes a slice of its width
    at a time, and backward, where most is in memory, matrices in it have at most `slice_values`
    values (0: as `tile_values`). `chunk_rows` is how many rows of the vocabulary the head takes at
    once, 0 for as many as `tile_values` allows.
    `cache_bytes` limits MLX's own cache, where it has one. On a GPU a block's forward or backward,
    or each operation in it, can be one `evaluation`. With `in_place` tokens that are decoded are
    multiplied by the weights where they lie.
    """

    tile_values: int
    attention_block: int
    cache_bytes: int = 0
    slices: bool = False
    chunk_rows: int = 0
    evaluation: Evaluation = "part"
    in_place: bool = False
    slice_values: int = 0

    @property
    def ways(self) -> tuple[object, ...]:
        """The choices of which instructions run; all others are of how much they take at once."""
        return self.slices, self.evaluation


@dataclass(frozen=True)
class Keeping:
    """A forward that computes the output and keeps `values`, and a backward that uses them too."""

    values: frozenset[str]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]


@dataclass(frozen=True)
class LoweredBlock:
    """One block as it runs.

    `forward` computes the output. `backward` computes the gradient of the input (except in the
    first layer with an adapter, where nothing reads it) from the input and the gradient of the
    output, and recomputes what else it reads. Layers before that one have no backward.
    `keeping` has the ways to recompute less. The first keeps a few values, which a file holds, and
    the second all values outside of an MLP that is sliced. The third takes that MLP whole, and
    keeps its products; the fourth keeps its activation as well. Each keeps all that those before it
    keep, but the third recomputes what cheap operations make of products alone, as of a router's.
    Where no MLP is sliced, there are the first two.
    `head` is the operation that passes over the vocabulary, in the last block.
    A block that decodes has a forward only. `alike` is the index of the first block that runs the
    same instructions over matrices of the same sizes.
    """

    block: Block
    program: Program
    adapted: frozenset[str]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    keeping: tuple[Keeping, ...]
    head: Operation | None
    alike: int = 0

    @property
    def may_reverse(self) -> bool:
        """Whether it may run backward: not an embedding without an adapter."""
        return bool(self.program.input or self.adapted)


@dataclass(frozen=True)
class LoweredModel:
    """All blocks at one sequence bucket, and the sizes at which their operations run.

    `first_adapted` is the index of the first block with an adapter: a backward pass ends there.
    `context` is how many tokens the decoded sequences may have, 0 if none are decoded; then the
    bucket is how many tokens are decoded at once.
    """

    blocks: tuple[LoweredBlock, ...]
    execution: Execution
    first_adapted: int
    context: int = 0

    @property
    def bucket(self) -> int:
        return self.execution.bucket

    @property
    def layers(self) -> tuple[LoweredBlock, ...]:
        """The blocks between the embedding and the head."""
        return self.blocks[1:-1]

    @property
    def most_kept(self) -> int:
        """The last of the layers' ways to keep values; 0 is the first."""
        return max((len(layer.keeping) for layer in self.layers), default=1) - 1

    @property
    def stored_values(self) -> int:
        """How many values of a layer a file holds between its forward and its backward, at most."""
        return max((len(layer.keeping[0].values) for layer in self.layers), default=0)

    @property
    def distinct(self) -> Iterator[LoweredBlock]:
        """The blocks of which no earlier one is alike."""
        return (block for index, block in enumerate(self.blocks) if block.alike == index)

    @property
    def distinct_layers(self) -> tuple[LoweredBlock, ...]:
        """The same of the layers."""
        last = len(self.blocks) - 1
        return tuple(block for block in self.distinct if 0 < block.alike < last)

    @property
    def slice_columns(self) -> int:
        """The most columns of its width that an MLP takes at once; 0 if none is sliced."""
        return max(self.execution.tile_columns.values(), default=0)

    def graph_keys(self, backward: bool) -> set[str]:
        """The keys of the serialized functions that rows of the bucket use.

        Decoding uses those for every number of tokens.
        """
        token_counts = DECODED_TOKENS if self.context else (self.bucket,)
        return {
            key
            for block in self.distinct
            for operation in block.program.operations
            for tokens in token_counts
            for key in operation.graph_keys(tokens, backward and block.may_reverse)
        }

    @property
    def cached_bytes(self) -> int:
        """The bytes of the key-value cache of one sequence."""
        shapes = (shape for block in self.blocks for shape in block.program.cached.values())
        return sum(math.prod(shape) for shape in shapes) * F32


def lower(
    manifest: Manifest,
    bucket: int,
    sizes: Sizes,
    packed: bool,
    context: int = 0,
    compute_dtype: str = "float32",
    compiled: bool = False,
    threads: int = 1,
    blocks: tuple[LoweredBlock, ...] = (),
) -> LoweredModel:
    """The lowered programs of all blocks at a sequence bucket.

    `blocks` are those of `lower_blocks`, if they are known.

    With `context` they decode sequences of at most so many tokens, `bucket` tokens at once, and
    keep keys and values.
    `packed` is the arithmetic of a GPU, which multiplies by whole quantized matrices. Those in
    floating point are converted tile by tile there too. A CPU multiplies a single token by packed
    tiles: that takes less time than to dequantize them for it.
    """
    blocks = blocks or lower_blocks(manifest, sizes, context)
    widths = _slice_widths(manifest, blocks, sizes)
    execution = Execution(
        manifest.tables,
        bucket,
        _tile_rows(manifest, sizes.tile_values, packed) | widths.rows,
        widths.columns,
        widths.backward,
        widths.experts,
        sizes.chunk_rows or _chunk_rows(manifest, sizes),
        sizes.attention_block,
        packed or (context > 0 and bucket == 1),
        manifest.lora.prefix,
        manifest.lora.rank,
        sizes.evaluation,
        compute_dtype,
        sizes.in_place,
        widths.stacked,
        compiled,
        threads,
    )
    first = manifest.first_adapted
    return LoweredModel(blocks, execution, first, context)


def lower_blocks(manifest: Manifest, sizes: Sizes, context: int = 0) -> tuple[LoweredBlock, ...]:
    """All blocks, which depend on `sizes.ways` alone; no MLP is sliced where none can be."""
    known: dict[tuple[str, frozenset[str], bool], LoweredBlock] = {}
    indices: dict[object, int] = {}
    blocks = []
    first = manifest.first_adapted
    programs = {name: each.program(manifest.device) for name, each in manifest.block_types.items()}
    if sizes.slices and all(fold(each) == each for each in programs.values()):
        sizes = replace(sizes, slices=False)
    for index, block in enumerate(manifest.blocks):
        adapted = frozenset(manifest.adapted(block))
        input_wanted = index > first  # nothing is trained before it
        key = (block.type, adapted, input_wanted)
        if key not in known:
            known[key] = _lower_block(manifest, block, sizes, adapted, input_wanted, context)
        matrices = (
            (each.rows, each.columns, each.bits, each.group_size, each.biases is None)
            for operation in manifest.block_types[block.type].operations
            for each in map(manifest.matrices.__getitem__, operation.matrices(block.tensor))
        )
        alike = indices.setdefault((key, *matrices), index)
        blocks.append(replace(known[key], block=block, alike=alike))
    return tuple(blocks)


def way_of(position: int, kept: Sequence[int]) -> int:
    """The way in which a layer keeps values; the last layer's position is 1.

    `kept` says how many of the last layers keep so much: in way 1 or more, in way 2 or more, and so
    on. None are more than the number before.
    """
    return sum(position <= count for count in kept)


def rows_at_once(rows: int, columns: int, values: int) -> int:
    """How many rows of a matrix are dequantized at once: tiles of at most so many values.

    All tiles have about the same size: a smaller last tile would save nothing, and leave a hole in
    the heap that the others do not fit.
    """
    most = max(1, values // columns)
    return math.ceil(rows / math.ceil(rows / most))


@dataclass
class _Widths:
    """The rows of gate and up, and the columns of down, that MLPs take at once, by full name.

    `backward` has both for the backward pass. `experts` are the columns of down where an expert at
    a time is taken. `stacked` are the rows of one of gate and up, which may lie in one matrix.
    """

    rows: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    stacked: dict[str, int] = field(default_factory=dict)


def _slice_widths(manifest: Manifest, blocks: Sequence[LoweredBlock], sizes: Sizes) -> _Widths:
    widths, most = _Widths(), sizes.slice_values or sizes.tile_values
    for lowered in blocks:
        tensor = lowered.block.tensor
        for operation in lowered.program.operations:
            if isinstance(operation, SlicedMlp):
                into, (down,) = operation.into.matrices(tensor), operation.down.matrices(tensor)
                gate, last = manifest.matrices[into[0]], manifest.matrices[down]
                width = width_of(gate, last, sizes.tile_values)
                widths.rows |= dict.fromkeys(into, width) | {down: last.rows}
                widths.columns[down] = width
                widths.stacked |= dict.fromkeys(into, last.columns)
                widths.backward |= dict.fromkeys((*into, down), width_of(gate, last, most))
            elif isinstance(operation, Experts):
                gate, _, last = operation.of_one(tensor, manifest.matrices)
                *of_gate_up, of_down = operation.matrices(tensor)
                width = width_of(gate, last, most)
                widths.rows |= dict.fromkeys(of_gate_up, width) | {of_down: last.rows}
                widths.experts[of_down] = width
    return widths


def _tile_rows(manifest: Manifest, values: int, packed: bool) -> dict[str, int]:
    return {
        name: matrix.rows
        if packed and not matrix.is_float
        else rows_at_once(matrix.rows, matrix.columns, values)
        for name, matrix in manifest.matrices.items()
    }


def _chunk_rows(manifest: Manifest, sizes: Sizes) -> int:
    if sizes.evaluation != "part":  # each chunk is one
        return math.ceil(manifest.vocab_size / MOST_CHUNKS)
    chunk = rows_at_once(manifest.vocab_size, manifest.hidden_size, sizes.tile_values)
    return max(LEAST_CHUNK_ROWS, chunk)


def _lower_block(
    manifest: Manifest,
    block: Block,
    sizes: Sizes,
    adapted: frozenset[str],
    input_wanted: bool,
    context: int,
) -> LoweredBlock:
    whole = manifest.block_types[block.type].program(manifest.device)
    if context:
        return _decoding(block, whole.decoding(context), adapted)
    program = fold(whole) if sizes.slices else whole
    backward = backward_schedule(program, adapted, input_wanted)
    ways: list[Keeping] = []
    if program.input and program.head is None:  # a layer
        kept = kept_values(program, adapted, input_wanted)
        ways = [
            _keeping(sizes, program, adapted, input_wanted, values)
            for values in (stored_values(program, kept), kept)
        ]
        for activated in (False, True) if sizes.slices else ():
            kept = kept_values(whole, adapted, input_wanted, activated)
            ways.append(_keeping(sizes, whole, adapted, input_wanted, kept, activated))
    return LoweredBlock(
        block,
        program,
        adapted,
        _evaluated(sizes, forward_schedule(program)),
        _evaluated(sizes, backward),
        tuple(ways),
        program.head,
    )


def _keeping(
    sizes: Sizes,
    program: Program,
    adapted: frozenset[str],
    input_wanted: bool,
    kept: frozenset[str],
    activated: bool = True,
) -> Keeping:
    backward = backward_schedule(program, adapted, input_wanted, kept, activated)
    forward = keeping_schedule(program, kept)
    return Keeping(kept, _evaluated(sizes, forward), _evaluated(sizes, backward))


def _evaluated(sizes: Sizes, schedule: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return _with_evaluations(schedule) if sizes.evaluation == "operation" else schedule


def _decoding(block: Block, program: Program, adapted: frozenset[str]) -> LoweredBlock:
    """A block that decodes, which takes all its tokens at once."""
    forward = forward_schedule(program)
    ways = (Keeping(frozenset(), forward, ()),)
    return LoweredBlock(block, program, adapted, forward, (), ways, program.head)


def _with_evaluations(schedule: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The instructions, of which those with weights or scores are evaluated one by one.

    The last of them is not, because the block's end is near.
    """
    costly = [at for at, instruction in enumerate(schedule) if not instruction.operation.cheap]
    return tuple(
        replace(instruction, evaluates=at in costly[:-1]) for at, instruction in enumerate(schedule)
    )
