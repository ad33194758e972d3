"""The bytes alive while each block of a manifest runs, under given sizes.

Pure arithmetic: sizes of values along the schedules of `runtime.lowering.schedule`, plus what each step
holds while it runs (`runtime.planner.workspace`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ondevice.bundle.manifest import (
    Block,
    BlockType,
    Manifest,
    Matrix,
    graph_key,
    graph_length,
    shape_at,
)
from runtime.lowering.schedule import (
    Op,
    backward_schedule,
    forward_schedule,
    kept_values,
    lse,
    outputs,
)
from runtime.lowering.token_tiles import fold, token_tile, unfold, widest_tile
from runtime.planner.workspace import F32, Sizes, Work, Workspace

MEZO_LANES = 16  # hidden states that MeZO moves side by side, where they fit


@dataclass(frozen=True)
class BlockPlan:
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


class Liveness:
    """The bytes alive while each block of a manifest runs under given sizes."""

    def __init__(self, manifest: Manifest, work: Work, sizes: Sizes) -> None:
        self.manifest, self.work, self.sizes = manifest, work, sizes
        self.workspace = Workspace(manifest, work, sizes)
        self._block_types, self._tiles = (
            dict(manifest.block_types),
            dict.fromkeys(manifest.block_types, work.bucket),
        )
        for name, block_type in manifest.block_types.items():
            folded = fold(block_type)
            tile = token_tile(folded, work.bucket, sizes.most_tokens)
            if tile < work.bucket:
                self._block_types[name], self._tiles[name] = folded, tile

    @property
    def token_tile(self) -> int:
        """The most tokens that an MLP takes at once."""
        return widest_tile(self.manifest, self.work.bucket, self.sizes.most_tokens)

    def all_adapter_bytes(self) -> int:
        return sum(self._block_adapters(block) for block in self.manifest.layers)

    def adapter_bytes(self) -> int:
        """What one block is lent; an evaluation holds all blocks' float32 adapters, too.

        Of rounded adapters, those of the matrix in hand are float32 again while it is multiplied.
        MeZO lends two perturbed copies for each query on its way.
        """
        block = self._lent(self._most_adapters())
        if self.work.method == "mezo":
            block *= 2 * min(self.work.queries, 2 + MEZO_LANES // 2)
        rounded = self.work.adapter_dtype != "float32"
        lent = block + (self._largest_adapter() if rounded else 0)
        if self.work.method != "eval":
            return lent
        return self.all_adapter_bytes() + (lent if rounded else 0)

    def gradient_bytes(self) -> int:
        """All blocks' gradients where micro-batches accumulate, else the largest block's.

        Those of several rows are added up layer by layer, of tiles of tokens matrix by matrix.
        """
        if self.work.method != "mebp":
            return 0
        fresh = self._most_adapters() if self.work.rows > 1 else self._largest_tiled_adapter()
        return self._held_gradients() + self._most_adapters() + fresh

    def perturbing_bytes(self) -> int:
        """What is alive beside the copies while MeZO perturbs a block: z, theta and their sum."""
        return 3 * self._most_adapters() if self.work.method == "mezo" else 0

    def only_in_layers(self) -> int:
        """Of adapters and gradients, what is gone where the embedding or the head runs."""
        if self.work.method == "eval":
            return 0
        return self.adapter_bytes() + self.gradient_bytes() - self._held_gradients()

    def _held_gradients(self) -> int:
        """All layers' gradients, until the last micro-batch of a step."""
        held = self.work.method == "mebp" and self.work.accumulation > 1
        return self.all_adapter_bytes() if held else 0

    def _lent(self, float32_bytes: int) -> int:
        """Adapters of so many bytes, as blocks are lent them."""
        return float32_bytes if self.work.adapter_dtype == "float32" else float32_bytes // 2

    def _most_adapters(self) -> int:
        return max(self._block_adapters(block) for block in self.manifest.layers)

    def _block_adapters(self, block: Block) -> int:
        return sum(self._adapters(block).values())

    def _largest_adapter(self) -> int:
        sizes = (self._adapters(block).values() for block in self.manifest.layers)
        return max((size for block in sizes for size in block), default=0)

    def _largest_tiled_adapter(self) -> int:
        """The largest of a matrix that meets a tile of tokens after the other."""
        return max(
            (
                size
                for block in self.manifest.layers
                for tiled in self._block_types[block.type].steps
                for step in tiled.steps
                for name, size in self._adapters(block).items()
                if name in {linear.name for linear in step.linears}
            ),
            default=0,
        )

    def _adapters(self, block: Block) -> dict[str, int]:
        """The float32 bytes of each of a block's adapters."""
        rank = int(self.manifest.lora["rank"])
        sizes = {}
        for name in self.manifest.adapted(block):
            matrix = self.manifest.matrices[block.tensor(name)]
            sizes[name] = (matrix.rows + matrix.columns) * rank * F32
        return sizes

    def packed_rows(self) -> int:
        """The most rows of a factor that a BLAS packs: tokens, or a group's heads x queries."""
        most = self.work.bucket
        for block_type in self.manifest.block_types.values():
            for step in block_type.steps:
                if step.op == "attention":
                    q, k, _ = (
                        shape_at(block_type.values[name], self.work.bucket) for name in step.inputs
                    )
                    most = max(most, q[1] // k[1] * min(self.work.bucket, self.sizes.query_block))
        return most

    def free_lanes(self, live: int, at_least: int, most: int) -> int:
        """How many hidden states fit side by side into `live` bytes in every block's forward.

        A layer's adapters are among them.
        """
        last = len(self.manifest.blocks) - 1
        for lanes in range(most, at_least, -1):
            alive = (
                self.forward(index, lanes) + (self.adapter_bytes() if 0 < index < last else 0)
                for index in range(last + 1)
            )
            if max(alive) <= live:
                return lanes
        return at_least

    def forward(self, index: int, lanes: int) -> int:
        """Bytes alive while `lanes` hidden states pass a block."""
        block = self.manifest.blocks[index]
        block_type = self._block_types[block.type]
        start = {block_type.input} if block_type.input else set()
        if not block_type.input:
            lanes = 1  # embedded one at a time
        found = self._peak(
            block, block_type, forward_schedule(block_type), start, lanes, self.work.bucket
        )
        found += self._held(block)
        if block_type.steps[-1].op == "head":  # which counts what it opens
            found = max(found, self.workspace.head(block_type, lanes))
        return found

    def graph_file_bytes(self) -> int:
        """The files of all graphs that rows of the bucket's length open."""
        keys = {
            graph_key(step.graph, direction, graph_length(step, self.work.bucket))
            for block_type in self.manifest.block_types.values()
            for step in block_type.steps
            for direction in ("forward", "vjp")
            if step.op == "elementwise"
            and not self.workspace.by_kernel(step)
            and (direction == "forward" or (block_type.input and self.work.method == "mebp"))
        }
        return sum(self.manifest.graphs[key].nbytes for key in keys)

    def kept_bytes(self, index: int) -> int:
        """What a layer's backward reads of its forward, for all rows of a micro-batch."""
        block = self.manifest.blocks[index]
        block_type = self._block_types[block.type]
        adapted = frozenset(self.manifest.adapted(block))
        kept = kept_values(block_type, adapted, index > 1)
        return self.work.rows * sum(self._size(block_type, name, self.work.bucket) for name in kept)

    def live_bytes_keeping(self, blocks: tuple[BlockPlan, ...], kept: int) -> int:
        """The most that is alive at once where the last `kept` layers recompute the least.

        What a layer keeps is part of what its own backward has alive; the head and the layers
        above it come on top of what waits below them.
        """
        head = len(blocks) - 1
        most = max(max(b.forward_bytes, b.backward_bytes) for b in blocks)
        waiting = 0
        for index in range(head - kept, head):
            own = self.kept_bytes(index)
            row = own // self.work.rows  # what the row in hand has kept is alive in its block
            others = waiting + own - row
            busy = max(blocks[index].backward_bytes, blocks[index].forward_bytes, row)
            most = max(most, others + busy)
            waiting += own
        return max(most, waiting + max(blocks[head].forward_bytes, blocks[head].backward_bytes))

    def largest_value(self) -> int:
        """The bytes of the largest value that passes between a layer's steps."""
        return max(self.largest_whole_value(), self.largest_tiled_value())

    def largest_whole_value(self) -> int:
        """The same of values that hold all tokens, whatever is tiled."""
        return max(value for value, inside in self._layer_values() if not inside)

    def mapped_value(self) -> int:
        """The largest value that is mapped where it is long; 0 where an MLP's are not tiled.

        There values of many lengths lie beside each other, and leave holes for each other.
        """
        return self.largest_whole_value() if self.token_tile < self.work.bucket else 0

    def largest_tiled_value(self) -> int:
        """The same of those inside a tiled step, which hold a tile of tokens; 0 for none."""
        return max((value for value, inside in self._layer_values() if inside), default=0)

    def _layer_values(self) -> Iterator[tuple[int, bool]]:
        """The bytes of every value of a layer, and whether a tiled step has it inside."""
        for block_type in (
            self._block_types[name] for name in {block.type for block in self.manifest.layers}
        ):
            inside = {
                name
                for one in block_type.steps
                for step in one.steps
                for name in outputs(step)
                if name not in one.outputs
            }
            for name in block_type.values:
                tokens = self._tiles[block_type.name] if name in inside else self.work.bucket
                yield self._size(block_type, name, tokens), name in inside

    def largest_packed_bytes(self) -> int:
        """The most that the matrices of one block take in weights.bin."""
        return max(
            sum(matrix.nbytes for matrix in self._matrices(block)) for block in self.manifest.blocks
        )

    def off_heap(self, index: int) -> int:
        """What of a block's peak is no heap's."""
        return self.workspace.off_heap(self._block_types[self.manifest.blocks[index].type])

    def unpacked_bytes(self, index: int) -> int:
        """A layer's weights as float32, with the shifts of affine groups."""
        return self._unpacked(self.manifest.blocks[index])

    def block(self, index: int, lanes: int) -> BlockPlan:
        block = self.manifest.blocks[index]
        block_type = self._block_types[block.type]
        adapted = frozenset(self.manifest.adapted(block))
        forward = self.forward(index, lanes)
        backward = 0
        if block_type.input and self.work.method == "mebp":
            head = block_type.steps[-1] if block_type.steps[-1].op == "head" else None
            begin = {block_type.input, f"~{head.inputs[0] if head else block_type.output}"}
            schedule = backward_schedule(block_type, adapted, index > 1)
            backward = self._peak(block, block_type, schedule, begin, 1, self.work.bucket)
            backward += self._held(block)
        return BlockPlan(block.name or block_type.name, forward, backward)

    def _size(self, block_type: BlockType, name: str, tokens: int) -> int:
        if name.endswith(".lse"):
            shape = shape_at(block_type.values[name[: -len(".lse")]], tokens)
            return math.prod(shape[:-1]) * F32
        return math.prod(shape_at(block_type.values[name.lstrip("~")], tokens)) * F32

    def _peak(
        self,
        block: Block,
        block_type: BlockType,
        schedule: tuple[Op, ...],
        alive: set[str],
        lanes: int,
        tokens: int,
    ) -> int:
        """The most alive along a schedule over so many tokens, from what is alive before."""
        held = _Held()
        held.take({name: (self._size(block_type, name, tokens), "") for name in alive})
        reverses = f"~{block_type.output}" in alive
        peak = 0
        for op in schedule:
            step = block_type.steps[op.step]
            made = dict.fromkeys(op.wanted, "")
            if op.backward:
                made = {f"~{name}": one for name, one in zip(op.wanted, op.same, strict=True)}
            elif step.op == "attention" and reverses:
                made[lse(step)] = ""
            before = held.nbytes
            sizes = {
                name: (self._size(block_type, name, tokens), one) for name, one in made.items()
            }
            fresh = held.take(sizes)
            work = self._step(block, block_type, op, lanes, tokens)
            held.drop(op.frees)
            after = held.nbytes
            others = max(before, after)  # lanes that wait, or are done and rid of what died
            if step.op in ("linear", "tiled"):
                others = before + fresh
            peak = max(peak, (lanes - 1) * others + before + fresh + work)
        return peak

    def _step(self, block: Block, block_type: BlockType, op: Op, lanes: int, tokens: int) -> int:
        """What a step holds beside what it takes and makes; tiles of tokens are views of that."""
        step = block_type.steps[op.step]
        if step.op != "tiled":
            return self.workspace.of(block, block_type, op, lanes, tokens)
        inner = unfold(block_type, step)
        if op.backward:
            adapted = frozenset(self.manifest.adapted(block))
            schedule = backward_schedule(inner, adapted, bool(op.wanted))
        else:
            schedule = forward_schedule(inner)
        return self._peak(block, inner, schedule, set(), lanes, self._tiles[block_type.name])

    def _matrices(self, block: Block) -> list[Matrix]:
        """What a block multiplies by."""
        block_type = self.manifest.block_types[block.type]
        names = [block.tensor(one.name) for step in block_type.steps for one in step.linears]
        names += [step.matrix for step in block_type.steps if step.op == "head"]
        return [self.manifest.matrices[name] for name in names]

    def _held(self, block: Block) -> int:
        """The weights that stay unpacked while the block runs."""
        return self._unpacked(block) if self.sizes.hold else 0

    def _unpacked(self, block: Block) -> int:
        """A whole block's weights, with the shifts of affine groups."""
        return sum(
            m.rows * m.columns * F32
            + (m.rows * m.columns // m.group_size * F32 if m.layout == "affine" else 0)
            for m in self._matrices(block)
        )
