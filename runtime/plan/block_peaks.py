"""The peak of the bytes in use while each block of a lowered model runs.

For each instruction of `runtime.plan` it adds up the values that exist then, and the bytes that the
operation needs while it runs (`runtime.operations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from runtime.arrays.stored import ITEM_BYTES, Block, pages
from runtime.bundle.manifest import Manifest, block_range
from runtime.core.remembered import remembered
from runtime.core.stripes import ARENAS
from runtime.operations.attention import START_BYTES, STARTS
from runtime.operations.base import Call, Operation
from runtime.operations.execution import materialized_bytes, packed_bytes
from runtime.operations.program import Instruction, Program
from runtime.operations.values import F32, bytes_at, gradient_of
from runtime.plan.adapter_bytes import AdapterBytes
from runtime.plan.demand import Demand
from runtime.plan.lower import LoweredBlock, LoweredModel, way_of
from runtime.storage.background import QUEUED

ARRAY_BYTES = 640  # of the objects of MLX and Python that hold a value of a further row
SLOT_BYTES = 1 << 15  # by which a layer's slot is larger than its weights, at most
STREAMED_BYTES = 1 << 20  # of a tile that is updated although no product reads it


@dataclass(frozen=True)
class BlockPeak:
    """The peak bytes in use while a block runs forward, and while it runs backward."""

    name: str
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, eq=False)
class _Array:
    nbytes: int


class _Held:
    """Values and gradients by name; several names may hold one array."""

    def __init__(self) -> None:
        self._arrays: dict[str, _Array] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in set(self._arrays.values()))

    def take(self, made: dict[str, tuple[int, str]]) -> int:
        """Add names, each with its bytes or the name whose array it shares; returns new bytes."""
        fresh = 0
        for name, (nbytes, same) in made.items():
            array = self._arrays.get(same)
            if array is None:
                array = _Array(nbytes)
                fresh += nbytes
            self._arrays[name] = array
        return fresh

    def drop(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._arrays.pop(name, None)


class PeakModel:
    """The bytes in use while the blocks of a lowered model run, for one training method."""

    def __init__(self, manifest: Manifest, lowered: LoweredModel, demand: Demand) -> None:
        self.manifest, self.lowered, self.demand = manifest, lowered, demand
        self.execution = lowered.execution
        self.adapters = AdapterBytes(manifest, lowered, demand)

    # Trained weights, and weights in slices.

    @cached_property
    def weight_update_bytes(self) -> int:
        """Extra bytes where weights are trained: to update, perturb and write tile after tile.

        Beside the tile there are its noise, the sum of its updates, the perturbed tile, the tile
        as it was read, and tiles that wait to be written; and while it is rounded, copies.
        """
        if not self.demand.trains_weights:
            return 0
        rows = self.execution.tile_rows
        matrices = self.manifest.matrices
        values = max(matrices[name].columns * height for name, height in rows.items())
        stored = max(ITEM_BYTES[matrix.packed.dtype] for matrix in matrices.values())
        tile = values * (3 * F32 + (2 + QUEUED) * stored + F32)
        looked_up = self.lowered.bucket * self.manifest.hidden_size * F32  # rows of the embedding
        return tile + looked_up + self.demand.noise_bytes

    @cached_property
    def assembled_bytes(self) -> int:
        """Extra bytes where workers hold the weights in slices, and assemble what is needed.

        All vectors; the current layer and the next, of the weights file or of the slots of trained
        weights; and of a head the rows of two tiles.
        """
        manifest, execution = self.manifest, self.execution
        ranges = [block_range(manifest, block) for block in manifest.layers]
        largest = max(stop - start for start, stop in ranges)
        trained = self.demand.trains_weights
        tiles = [STREAMED_BYTES] if trained else []
        for name in {name for block in manifest.blocks for name in self._outside_layers(block)}:
            matrix = manifest.matrices[name]
            height = max(execution.chunk_rows, execution.tile_rows.get(name, 0))
            tiles.append(matrix.nbytes // matrix.rows * min(height, matrix.rows))
        vectors = sum(extent.nbytes for extent in manifest.vectors.values())
        return vectors + ARENAS * (largest + (SLOT_BYTES if trained else 0) + max(tiles))

    def _outside_layers(self, block: Block) -> tuple[str, ...]:
        """The names of the matrices of the embedding or the head."""
        if block in self.manifest.layers:
            return ()
        operations = self.manifest.block_types[block.type].operations
        return tuple(name for each in operations for name in each.matrices(block.tensor))

    # Blocks.

    def _alike(self, index: int) -> int:
        return self.lowered.blocks[index].alike

    def block(self, index: int, lanes: int) -> BlockPeak:
        """The peaks of one block, with `lanes` hidden states in its forward."""
        label = self.lowered.blocks[index].block.label
        return BlockPeak(label, self.forward(index, lanes), self._backward(self._alike(index)))

    @remembered
    def _backward(self, index: int) -> int:
        lowered = self.lowered.blocks[index]
        program = lowered.program
        if not (self.demand.backward and lowered.backward):
            return 0
        (last,) = lowered.head.activations if lowered.head else (program.output,)
        alive = {gradient_of(last)}
        alive |= {program.input, *self._starts(lowered)} if program.input else set()
        schedule = lowered.backward
        if lowered.keeping:
            schedule = lowered.keeping[0].backward
            alive |= lowered.keeping[0].values
        peak = self._peak(lowered, schedule, alive)
        return peak + self.adapters.at_end(lowered, 1)

    def forward(self, index: int, lanes: int) -> int:
        """Peak bytes while `lanes` hidden states run through a block together."""
        return self._forward(self._alike(index), lanes)

    @remembered
    def _forward(self, index: int, lanes: int) -> int:
        lowered = self.lowered.blocks[index]
        program = lowered.program
        start = {program.input, *self._starts(lowered)} if program.input else set()
        if not program.input:
            lanes = 1  # embedded one at a time
        schedule = lowered.forward
        if self.demand.backward and lowered.keeping:
            schedule = lowered.keeping[0].forward
        peak = self._peak(lowered, schedule, start, lanes)
        if lowered.head is not None:  # which counts what it dequantizes
            values, tensor = program.values, lowered.block.tensor
            call = Call(self.demand.backward, (), lanes, self.lowered.bucket, values, tensor)
            peak = max(peak, lowered.head.working_bytes(call, self.execution))
        return peak + self.adapters.at_end(lowered, lanes)

    def _starts(self, lowered: LoweredBlock) -> tuple[str, ...]:
        """The value that a layer has besides, for each hidden state of packed rows."""
        return (STARTS,) if self.demand.packs and lowered.head is None else ()

    def free_lanes(self, live: int, at_least: int, most: int) -> int:
        """How many hidden states can run through every block together within `live` bytes.

        These bytes include a layer's adapters.
        """
        last = len(self.manifest.blocks) - 1

        def fits(block: LoweredBlock, lanes: int) -> bool:
            besides = self.adapters.current if 0 < block.alike < last else 0
            return self.forward(block.alike, lanes) + besides <= live

        for lanes in range(most, at_least, -1):
            if all(fits(block, lanes) for block in self.lowered.distinct):
                return lanes
        return at_least

    def kept_bytes(self, index: int, way: int) -> int:
        """Bytes of the forward values that a layer so keeps for its backward, for all rows."""
        return self._kept_bytes(self._alike(index), way)

    @remembered
    def _kept_bytes(self, index: int, way: int) -> int:
        lowered = self.lowered.blocks[index]
        call, names = self._plain(lowered), lowered.keeping[way].values
        sizes = _statistic_bytes(lowered.program, call)
        kept = (sizes[name] if name in sizes else call.bytes_of(name) for name in names)
        objects = (self.demand.rows - 1) * len(names) * ARRAY_BYTES
        return self.demand.rows * sum(kept) + objects

    def keeping_bytes(self, index: int, way: int) -> int:
        """Peak bytes of a layer whose forward so keeps values that its backward starts from."""
        return self._keeping_bytes(self._alike(index), way)

    @remembered
    def _keeping_bytes(self, index: int, way: int) -> int:
        lowered = self.lowered.blocks[index]
        program, keeping = lowered.program, lowered.keeping[way]
        given = {program.input, *self._starts(lowered)}
        peak = self._peak(lowered, keeping.forward, given)
        if keeping.backward:
            alive = given | {gradient_of(program.output), *keeping.values}
            peak = max(peak, self._peak(lowered, keeping.backward, alive))
        return peak

    def hole_beside_kept(self, kept: Sequence[int]) -> int:
        """The most unused bytes that an operation leaves if the last layers so keep values."""
        ways = sum(count > 0 for count in kept)
        return max(self._holes[:ways], default=0)

    @cached_property
    def _holes(self) -> list[int]:
        """The most unused bytes that an operation leaves in layers that so keep values."""
        holes = [0] * self.lowered.most_kept
        for layer in self.lowered.distinct_layers:
            call = self._plain(layer)
            for at, keeping in enumerate(layer.keeping[1:]):
                left = (each.operation.hole_beside_kept(call) for each in keeping.backward)
                holes[at] = max([holes[at], *left])
        return holes

    def live_bytes_keeping(self, blocks: tuple[BlockPeak, ...], kept: Sequence[int]) -> int:
        """The peak bytes if so many of the last layers keep values (see `way_of`).

        What a layer keeps of a row is part of its own peak. While the head or a later layer runs,
        what earlier layers keep is in memory too.
        """
        head = len(blocks) - 1
        most = max(max(b.forward_bytes, b.backward_bytes) for b in blocks)
        waiting = 0
        for index in range(head - max(kept, default=0), head):
            way = way_of(head - index, kept)
            own = self.kept_bytes(index, way)
            row = own // self.demand.rows  # already part of the block's peak for the current row
            others = waiting + own - row
            peaks = (blocks[index].backward_bytes, blocks[index].forward_bytes)
            busy = max(*peaks, self.keeping_bytes(index, way), row)
            most = max(most, others + busy)
            waiting += own
        return max(most, waiting + max(blocks[head].forward_bytes, blocks[head].backward_bytes))

    def _peak(
        self,
        lowered: LoweredBlock,
        schedule: tuple[Instruction, ...],
        alive: set[str],
        lanes: int = 1,
    ) -> int:
        """The peak bytes along a schedule, given the values that exist before it."""
        if self.execution.one_evaluation:
            return self._allocated(lowered, schedule, alive, lanes)
        held = _Held()
        size = _sizes(lowered.program, self._plain(lowered, lanes))
        held.take({name: (size(name), "") for name in alive})
        peak = 0
        for instruction in schedule:
            views = instruction.operation.views(self.execution)
            names = (*instruction.wanted, *instruction.statistics)
            made = {name: views.get(name, "") for name in names}
            if instruction.backward:
                made = {
                    gradient_of(n): s
                    for n, s in zip(instruction.wanted, instruction.same, strict=True)
                }
            before = held.nbytes
            fresh = held.take({name: (size(name), same) for name, same in made.items()})
            work = self._working_bytes(lowered, instruction, lanes)
            held.drop(instruction.frees)
            after = held.nbytes
            others = max(before, after)  # lanes before or after this instruction
            if instruction.operation.runs_once_per_tile:
                others = before + fresh
            peak = max(peak, (lanes - 1) * others + before + fresh + work)
        return peak

    def _allocated(
        self,
        lowered: LoweredBlock,
        schedule: tuple[Instruction, ...],
        alive: set[str],
        lanes: int,
    ) -> int:
        """The peak bytes where nothing is freed before an evaluation ends, in whole pages.

        A GPU keeps what a command buffer reads, and begins buffer after buffer without waiting.
        """
        size = _sizes(lowered.program, self._plain(lowered, lanes))
        known = set(alive)
        total = lanes * sum(pages(size(name)) for name in known)
        peak = total
        for instruction in schedule:
            operation = instruction.operation
            together = operation.runs_once_per_tile
            call = self._call(lowered, instruction, lanes if together else 1)
            made = [*instruction.wanted, *instruction.statistics]
            if instruction.backward:
                gradients = list(map(gradient_of, made))
                # one is added to another that is there, and zeros stand for one that is not
                made += [name for name in gradients if name in known]
                made += {gradient_of(name) for name in operation.results} - known
                known.update(gradients)
            work = operation.allocated_bytes(call, self.execution)
            work += sum(map(pages, self._widened(operation, call))) * call.lanes
            results = sum(pages(size(name)) for name in made)
            total += lanes * results + (work if together else lanes * work)
            peak = max(peak, total)
            if not instruction.backward:
                known.update(made)
            known.difference_update(instruction.frees)
            if instruction.evaluates:
                total = lanes * sum(pages(size(name)) for name in known)
        return peak

    def _plain(self, lowered: LoweredBlock, lanes: int = 1) -> Call:
        """A call for the sizes of values."""
        values, tensor = lowered.program.values, lowered.block.tensor
        size = self.execution.value_bytes
        return Call(False, (), lanes, self.lowered.bucket, values, tensor, item_bytes=size)

    def _widened(self, operation: Operation, call: Call) -> Iterator[int]:
        """Bytes of each float32 copy that an operation takes or makes of one lane's values."""
        if self.execution.value_bytes < F32:
            for name in operation.widened(call.backward):
                yield bytes_at(call.values[name], call.tokens)

    def _call(self, lowered: LoweredBlock, instruction: Instruction, lanes: int) -> Call:
        values, tensor = lowered.program.values, lowered.block.tensor
        dropped = lowered.adapted if self.demand.drops_inputs else frozenset()
        return Call(
            instruction.backward,
            instruction.wanted,
            lanes,
            self.lowered.bucket,
            values,
            tensor,
            dropped,
            self.demand.observes_inputs,
            self.execution.value_bytes if instruction.operation.any_dtype else F32,
        )

    def _working_bytes(self, lowered: LoweredBlock, instruction: Instruction, lanes: int) -> int:
        """Bytes that an instruction needs besides its inputs and results."""
        call, operation = self._call(lowered, instruction, lanes), instruction.operation
        copies = lanes if operation.runs_once_per_tile else 1
        widened = sum(self._widened(operation, call)) * copies
        return operation.working_bytes(call, self.execution) + widened

    # Weights.

    def materialized_bytes(self, index: int) -> int:
        """Bytes of a layer's weights as products take them, with the shifts of affine groups."""
        matrices = self.manifest.matrices_of(self.manifest.blocks[index])
        if self.execution.packed:
            return sum(map(packed_bytes, matrices))
        return sum(materialized_bytes(each, self.execution.value_dtype) for each in matrices)

    @cached_property
    def largest_packed_bytes(self) -> int:
        """The most bytes that the matrices of one block take in weights.bin."""
        return max(
            sum(matrix.nbytes for matrix in self.manifest.matrices_of(block))
            for block in self.manifest.blocks
        )

    def graph_file_bytes(self) -> int:
        """Bytes of the files of all graphs that rows of the bucket's length use."""
        keys = self.lowered.graph_keys(self.demand.backward)
        return sum(self.manifest.graphs[key].nbytes for key in keys)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors that stay in memory where tokens are multiplied in place."""
        if not self.execution.in_place:
            return 0
        return sum(math.prod(extent.shape) * F32 for extent in self.manifest.vectors.values())

    @cached_property
    def packed_rows(self) -> int:
        """The most rows that a BLAS packs: tokens, or in attention a group's heads x queries."""
        rows = (
            operation.packed_rows(block.program.values, self.execution)
            for block in self.lowered.distinct
            for operation in block.program.operations
        )
        return max(self.lowered.bucket, *rows)

    # Values.

    @cached_property
    def largest_whole_value(self) -> int:
        """Bytes of the largest value that a layer's operations read or compute."""
        return max(
            bytes_at(layer.program.values[name], self.lowered.bucket)
            for layer in self.lowered.distinct_layers
            for operation in layer.program.operations
            for name in (*operation.activations, *operation.results)
        )

    @property
    def mapped_value(self) -> int:
        """Bytes of the largest value that may be mapped outside the heap; 0 if no MLP is sliced.

        Without slices, values of many sizes lie on the heap and fit each other's holes.
        """
        return self.largest_whole_value if self.lowered.slice_columns else 0

    @cached_property
    def largest_tile_bytes(self) -> int:
        """The most bytes that any matrix's tile takes while it is dequantized."""
        return self.execution.largest_tile_bytes()


def _sizes(program: Program, call: Call) -> Callable[[str], int]:
    """The bytes of a value by its name."""
    statistics = _statistic_bytes(program, call)

    def size(name: str) -> int:
        if name in statistics:
            return statistics[name]
        if name == STARTS:
            return call.tokens * START_BYTES
        return call.bytes_of(name.removeprefix("~"))

    return size


def _statistic_bytes(program: Program, call: Call) -> dict[str, int]:
    """The bytes of the values that a forward computes only for its backward."""
    return {
        name: operation.statistic_bytes(name, call)
        for operation in program.operations
        for name in operation.statistics
    }
