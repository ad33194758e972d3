"""The bytes alive while each block of a lowered model runs.

It follows the instructions of `runtime.lowering`, adds up the values they make and free, and what
each operation holds while it runs (`ondevice.operations`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ondevice.bundle.manifest import Manifest
from ondevice.operations.base import Visit, materialized_bytes
from ondevice.operations.program import Block, Program
from ondevice.operations.values import F32, bytes_at, gradient_of
from runtime.lowering.lower import LoweredBlock, LoweredModel
from runtime.lowering.schedule import Instruction
from runtime.lowering.token_tiles import tiled_of
from runtime.planner.demand import Demand


@dataclass(frozen=True)
class BlockPeak:
    """Peak bytes alive while a block runs forward and backward."""

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
        """Hold these, each of so many bytes or the array of another name; returns the new bytes."""
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
    """What is alive while the blocks of a lowered model run under a method's demand."""

    def __init__(
        self, manifest: Manifest, lowered: LoweredModel, demand: Demand, adapter_dtype: str
    ) -> None:
        self.manifest, self.lowered, self.demand = manifest, lowered, demand
        self.execution = lowered.execution
        self._rounded = adapter_dtype != "float32"
        self._forwards: dict[tuple[int, int], int] = {}

    # Adapters and gradients.

    @cached_property
    def all_adapter_bytes(self) -> int:
        """The float32 adapters of all layers."""
        return sum(self.block_adapter_bytes(block) for block in self.manifest.layers)

    @cached_property
    def adapter_bytes(self) -> int:
        """The adapters in memory while a layer runs.

        Of rounded adapters, those of the current matrix are float32 again while it is multiplied.
        """
        one = self._most_adapters // 2 if self._rounded else self._most_adapters
        current = one * self.demand.adapter_copies
        if self._rounded:
            current += self._largest_adapter
        if not self.demand.all_adapters:
            return current
        return self.all_adapter_bytes + (current if self._rounded else 0)

    @cached_property
    def gradient_bytes(self) -> int:
        """All layers' gradients where micro-batches accumulate, else the largest layer's.

        Those of several rows are added up layer by layer, of tiles of tokens matrix by matrix.
        """
        if not self.demand.backward:
            return 0
        fresh = self._most_adapters if self.demand.rows > 1 else self._largest_tiled_adapter
        return self._held_gradients + self._most_adapters + fresh

    @property
    def perturbing_bytes(self) -> int:
        """What is alive besides a block's adapters while copies of them are made."""
        return self.demand.scratch_copies * self._most_adapters

    @cached_property
    def only_in_layers(self) -> int:
        """Of adapters and gradients, what is gone where the embedding or the head runs."""
        if self.demand.all_adapters:
            return 0
        return self.adapter_bytes + self.gradient_bytes - self._held_gradients

    @property
    def _held_gradients(self) -> int:
        """All layers' gradients, until the last micro-batch of a step."""
        return self.all_adapter_bytes if self.demand.holds_gradients else 0

    @cached_property
    def _most_adapters(self) -> int:
        return max(self.block_adapter_bytes(block) for block in self.manifest.layers)

    def block_adapter_bytes(self, block: Block) -> int:
        """The float32 adapters of one block."""
        return sum(self._adapters(block).values())

    @cached_property
    def _largest_adapter(self) -> int:
        sizes = (self._adapters(block).values() for block in self.manifest.layers)
        return max((size for block in sizes for size in block), default=0)

    @cached_property
    def _largest_tiled_adapter(self) -> int:
        """The largest of a matrix that is multiplied by one tile of tokens after the other."""
        sizes = []
        for layer in self.lowered.layers:
            tiled = tiled_of(layer.program)
            inside = set() if tiled is None else set(tiled.adaptable)
            adapters = self._adapters(layer.block)
            sizes += [size for name, size in adapters.items() if name in inside]
        return max(sizes, default=0)

    def _adapters(self, block: Block) -> dict[str, int]:
        """The float32 bytes of each of a block's adapters."""
        rank = int(self.manifest.lora["rank"])
        sizes = {}
        for name in self.manifest.adapted(block):
            matrix = self.manifest.matrices[block.tensor(name)]
            sizes[name] = (matrix.rows + matrix.columns) * rank * F32
        return sizes

    # Blocks.

    def block(self, index: int, lanes: int) -> BlockPeak:
        """The peaks of one block, with so many lanes forward."""
        lowered = self.lowered.blocks[index]
        program = lowered.program
        backward = 0
        if program.input and self.demand.backward:
            (last,) = lowered.head.activations if lowered.head else (program.output,)
            alive = {program.input, gradient_of(last)}
            backward = self._peak(lowered, program, lowered.backward, alive, 1, self.lowered.bucket)
            backward += self._held_weights(lowered)
        return BlockPeak(lowered.block.label, self.forward(index, lanes), backward)

    def forward(self, index: int, lanes: int) -> int:
        """Bytes alive while `lanes` hidden states pass a block."""
        if (index, lanes) not in self._forwards:
            self._forwards[index, lanes] = self._forward(self.lowered.blocks[index], lanes)
        return self._forwards[index, lanes]

    def _forward(self, lowered: LoweredBlock, lanes: int) -> int:
        program, bucket = lowered.program, self.lowered.bucket
        start = {program.input} if program.input else set()
        if not program.input:
            lanes = 1  # embedded one at a time
        found = self._peak(lowered, program, lowered.forward, start, lanes, bucket)
        found += self._held_weights(lowered)
        if lowered.head is not None:  # which counts what it dequantizes
            visit = Visit(
                self.demand.backward, (), lanes, bucket, program.values, lowered.block.tensor
            )
            found = max(found, lowered.head.working_bytes(visit, self.execution))
        return found

    def free_lanes(self, live: int, at_least: int, most: int) -> int:
        """How many hidden states fit side by side into `live` bytes in every block's forward.

        A layer's adapters are among them.
        """
        last = len(self.manifest.blocks) - 1
        for lanes in range(most, at_least, -1):
            alive = (
                self.forward(index, lanes) + (self.adapter_bytes if 0 < index < last else 0)
                for index in range(last + 1)
            )
            if max(alive) <= live:
                return lanes
        return at_least

    def kept_bytes(self, index: int) -> int:
        """What a layer's backward reads of its forward, for all rows of a micro-batch."""
        lowered = self.lowered.blocks[index]
        bucket = self.lowered.bucket
        visit = Visit(False, (), 1, bucket, lowered.program.values, lowered.block.tensor)
        sizes = _statistic_bytes(lowered.program, visit)
        kept = sum(sizes[name] if name in sizes else visit.bytes_of(name) for name in lowered.kept)
        return self.demand.rows * kept

    def live_bytes_keeping(self, blocks: tuple[BlockPeak, ...], kept: int) -> int:
        """The most that is alive at once where the last `kept` layers recompute the least.

        What a layer keeps is part of what its own backward has alive; the head and the layers
        above it come on top of what waits below them.
        """
        head = len(blocks) - 1
        most = max(max(b.forward_bytes, b.backward_bytes) for b in blocks)
        waiting = 0
        for index in range(head - kept, head):
            own = self.kept_bytes(index)
            row = own // self.demand.rows  # what the current row has kept is alive in its block
            others = waiting + own - row
            busy = max(blocks[index].backward_bytes, blocks[index].forward_bytes, row)
            most = max(most, others + busy)
            waiting += own
        return max(most, waiting + max(blocks[head].forward_bytes, blocks[head].backward_bytes))

    def _peak(
        self,
        lowered: LoweredBlock,
        program: Program,
        schedule: tuple[Instruction, ...],
        alive: set[str],
        lanes: int,
        tokens: int,
    ) -> int:
        """The most alive along a schedule over so many tokens, from what is alive before."""
        held = _Held()
        plain = Visit(False, (), lanes, tokens, program.values, lowered.block.tensor)
        statistics = _statistic_bytes(program, plain)

        def size(name: str) -> int:
            if name in statistics:
                return statistics[name]
            return bytes_at(program.values[name.removeprefix("~")], tokens)

        held.take({name: (size(name), "") for name in alive})
        peak = 0
        for one in schedule:
            made = dict.fromkeys((*one.wanted, *one.statistics), "")
            if one.backward:
                made = {gradient_of(n): s for n, s in zip(one.wanted, one.same, strict=True)}
            before = held.nbytes
            fresh = held.take({name: (size(name), same) for name, same in made.items()})
            work = self._working_bytes(lowered, program, one, lanes, tokens)
            held.drop(one.frees)
            after = held.nbytes
            others = max(before, after)  # lanes that wait, or are done and rid of what died
            if one.operation.runs_once_per_tile:
                others = before + fresh
            peak = max(peak, (lanes - 1) * others + before + fresh + work)
        return peak

    def _working_bytes(
        self, lowered: LoweredBlock, program: Program, one: Instruction, lanes: int, tokens: int
    ) -> int:
        """What an instruction holds besides what it takes and makes; tiles of tokens are views."""
        if one.body is not None:
            body = one.body
            return self._peak(lowered, body.program, body.instructions, set(), lanes, body.tokens)
        values, tensor = program.values, lowered.block.tensor
        visit = Visit(one.backward, one.wanted, lanes, tokens, values, tensor)
        return one.operation.working_bytes(visit, self.execution)

    # Weights.

    def materialized_bytes(self, index: int) -> int:
        """A layer's weights as float32, with the shifts of affine groups."""
        block = self.manifest.blocks[index]
        return sum(map(materialized_bytes, self.manifest.matrices_of(block)))

    def _held_weights(self, lowered: LoweredBlock) -> int:
        """The weights that stay dequantized while the block runs."""
        if not self.lowered.hold:
            return 0
        return sum(map(materialized_bytes, self.manifest.matrices_of(lowered.block)))

    @cached_property
    def largest_packed_bytes(self) -> int:
        """The most that the matrices of one block take in weights.bin."""
        return max(
            sum(matrix.nbytes for matrix in self.manifest.matrices_of(block))
            for block in self.manifest.blocks
        )

    def graph_file_bytes(self) -> int:
        """The files of all graphs that rows of the bucket's length open."""
        keys = self.lowered.graph_keys(self.demand.backward)
        return sum(self.manifest.graphs[key].nbytes for key in keys)

    @cached_property
    def packed_rows(self) -> int:
        """The most rows of a factor that a BLAS packs: tokens, or a group's heads x queries."""
        rows = (
            operation.packed_rows(block.program.values, self.execution)
            for block in self.lowered.blocks
            for operation in block.program.operations
        )
        return max(self.lowered.bucket, *rows)

    # Values, for models of an allocator.

    def largest_value(self) -> int:
        """The bytes of the largest value that passes between a layer's operations."""
        return max(self.largest_whole_value, self.largest_tiled_value)

    @cached_property
    def largest_whole_value(self) -> int:
        """The same of values that hold all tokens, whatever is tiled."""
        return max(value for value, inside in self._layer_values() if not inside)

    @cached_property
    def largest_tiled_value(self) -> int:
        """The same of those inside a `Tiled` operation, which hold a tile of tokens; 0 for none."""
        return max((value for value, inside in self._layer_values() if inside), default=0)

    @cached_property
    def largest_logits_bytes(self) -> int:
        """The logits of one row over a chunk of the vocabulary."""
        heads = (block.head for block in self.lowered.blocks if block.head is not None)
        return max((head.streamed(self.execution)[0] for head in heads), default=0)

    @property
    def mapped_value(self) -> int:
        """The largest value that is mapped where it is long; 0 where an MLP's are not tiled.

        There values of many lengths lie beside each other, and leave holes for each other.
        """
        return self.largest_whole_value if self.lowered.is_tiled else 0

    def off_heap(self, index: int) -> tuple[int, int, int]:
        """What of a block's peak may be no heap's: the largest tile; logits, and all of a chunk."""
        tile = self.execution.largest_tile_bytes()
        head = self.lowered.blocks[index].head
        logits, chunk = (0, 0) if head is None else head.streamed(self.execution)
        return tile, logits, chunk

    def _layer_values(self) -> Iterator[tuple[int, bool]]:
        """The bytes of every value of a layer, and whether a `Tiled` operation has it inside."""
        programs = {layer.block.type: layer for layer in self.lowered.layers}
        for layer in programs.values():
            tiled = tiled_of(layer.program)
            inside = set() if tiled is None else set(tiled.inner_values)
            for name, shape in layer.program.values.items():
                tokens = layer.tile_tokens if name in inside else self.lowered.bucket
                yield bytes_at(shape, tokens), name in inside


def _statistic_bytes(program: Program, visit: Visit) -> dict[str, int]:
    """The bytes of the values that a forward makes for its backward alone."""
    return {
        name: operation.statistic_bytes(name, visit)
        for operation in program.operations
        for name in operation.statistics
    }
