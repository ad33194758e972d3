"""The bytes alive while each block of a manifest runs, under given sizes.

Pure arithmetic: sizes of values along the schedules of `runtime.schedule`, plus what each kernel
holds while it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ondevice.manifest import Block, Kind, Manifest, Matrix, Step, at_rung, graph_key, graph_length
from runtime.heap import MOST_HEAP_BLOCK_BYTES
from runtime.schedule import Op, backward_schedule, forward_schedule, kept_values, lse

F32 = 4
MEZO_LANES = 16  # hidden states that MeZO moves side by side, where they fit


@dataclass(frozen=True)
class Sizes:
    """The settings a plan chooses among, from generous to frugal."""

    tile_values: int
    query_block: int
    cache_bytes: int
    hold: bool = False  # a block's unpacked weights, as long as the block runs


@dataclass(frozen=True)
class Work:
    """What is to be planned: a micro-batch's shape and what the method keeps.

    `method` is mebp, mezo or eval; `layout` is "budget" (what this planner is for) or "paper".
    """

    rung: int
    rows: int = 1
    accumulation: int = 1
    optimizer: str = "adamw"
    arithmetic: str = "unpacked"
    method: str = "mebp"
    queries: int = 1
    layout: str = "budget"
    prefetch: bool = True
    adapter_dtype: str = "float32"
    threads: int = 1  # of the BLAS

    @property
    def hidden_states(self) -> int:
        """How many hidden states one step moves."""
        rows = self.rows * self.accumulation
        return 2 * self.queries * rows if self.method == "mezo" else self.rows


@dataclass(frozen=True)
class BlockPlan:
    """Peak bytes alive while a block runs forward and backward."""

    name: str
    forward_bytes: int
    backward_bytes: int


class Liveness:
    """The bytes alive while each block of a manifest runs under given sizes."""

    def __init__(self, manifest: Manifest, work: Work, sizes: Sizes) -> None:
        self.manifest, self.work, self.sizes = manifest, work, sizes
        width = manifest.hidden_size
        self.chunk_rows = max(64, min(manifest.vocab_size, sizes.tile_values // width))

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
        """All blocks' gradients where micro-batches accumulate, else the largest block's."""
        if self.work.method != "mebp":
            return 0
        return self._held_gradients() + self._most_adapters() * (2 if self.work.rows > 1 else 1)

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
        return sum(self._adapters(block))

    def _largest_adapter(self) -> int:
        return max(size for block in self.manifest.layers for size in self._adapters(block))

    def _adapters(self, block: Block) -> list[int]:
        """The float32 bytes of each of a block's adapters."""
        rank = int(self.manifest.lora["rank"])
        matrices = (
            self.manifest.matrices[block.tensor(name)] for name in self.manifest.adapted(block)
        )
        return [(m.rows + m.columns) * rank * F32 for m in matrices]

    def packed_rows(self) -> int:
        """The most rows of a factor that a BLAS packs: tokens, or a group's heads x queries."""
        most = self.work.rung
        for kind in self.manifest.kinds.values():
            for step in kind.steps:
                if step.op == "attention":
                    q, k, _ = (at_rung(kind.values[name], self.work.rung) for name in step.inputs)
                    most = max(most, q[1] // k[1] * min(self.work.rung, self.sizes.query_block))
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
        kind = self.manifest.kinds[block.kind]
        adapted = frozenset(self.manifest.adapted(block))
        start = {kind.input} if kind.input else set()
        if not kind.input:
            lanes = 1  # embedded one at a time
        found = self._peak(block, kind, forward_schedule(kind), start, adapted, lanes)
        if kind.steps[-1].op == "head":
            found = max(found, self._head(kind, kind.steps[-1], lanes))
        return found

    def kept_bytes(self, index: int) -> int:
        """What a layer's backward reads of its forward, for all rows of a micro-batch."""
        block = self.manifest.blocks[index]
        kind = self.manifest.kinds[block.kind]
        adapted = frozenset(self.manifest.adapted(block))
        kept = kept_values(kind, adapted, index > 1)
        return self.work.rows * sum(self._size(kind, name) for name in kept)

    def live_bytes_keeping(self, blocks: tuple[BlockPlan, ...], kept: int) -> int:
        """The most that is alive at once where the last `kept` layers recompute nothing.

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
        kinds = [self.manifest.kinds[name] for name in {b.kind for b in self.manifest.layers}]
        return max(self._size(kind, name) for kind in kinds for name in kind.values)

    def largest_packed_bytes(self) -> int:
        """The most that the matrices of one block take in weights.bin."""
        return max(
            sum(matrix.nbytes for matrix in self._matrices(block)) for block in self.manifest.blocks
        )

    def unpacked_bytes(self, index: int) -> int:
        """A layer's weights as float32, with the shifts of affine groups."""
        block = self.manifest.blocks[index]
        return self._held(block)

    def block(self, index: int, lanes: int) -> BlockPlan:
        block = self.manifest.blocks[index]
        kind = self.manifest.kinds[block.kind]
        adapted = frozenset(self.manifest.adapted(block))
        forward = self.forward(index, lanes)
        backward = 0
        if kind.input and self.work.method == "mebp":
            head = kind.steps[-1] if kind.steps[-1].op == "head" else None
            begin = {kind.input, f"~{head.inputs[0] if head else kind.output}"}
            schedule = backward_schedule(kind, adapted, index > 1)
            backward = self._peak(block, kind, schedule, begin, adapted, 1)
        return BlockPlan(block.name or kind.name, forward, backward)

    def _size(self, kind: Kind, name: str) -> int:
        if name.endswith(".lse"):
            shape = at_rung(kind.values[name[: -len(".lse")]], self.work.rung)
            return math.prod(shape[:-1]) * F32
        return math.prod(at_rung(kind.values[name.lstrip("~")], self.work.rung)) * F32

    def _peak(
        self,
        block: Block,
        kind: Kind,
        schedule: tuple[Op, ...],
        alive: set[str],
        adapted: frozenset[str],
        lanes: int,
    ) -> int:
        alive = set(alive)
        peak = 0
        held = self._held(block) if self.sizes.hold else 0
        for op in schedule:
            step = kind.steps[op.step]
            made = {f"~{name}" for name in op.wanted} if op.backward else set(op.wanted)
            if step.op == "attention" and not op.backward and f"~{kind.output}" in alive:
                made.add(lse(step))
            before = sum(self._size(kind, name) for name in alive)
            fresh = sum(self._size(kind, name) for name in made)
            work = self._workspace(block, kind, op, lanes)
            alive |= made
            alive -= set(op.frees)
            after = sum(self._size(kind, name) for name in alive)
            others = max(before, after)  # lanes that wait, or are done and rid of what died
            if step.op == "linear":
                others = before + fresh
            peak = max(peak, held + (lanes - 1) * others + before + fresh + work)
        return peak

    def _matrices(self, block: Block) -> list[Matrix]:
        """What a block multiplies by."""
        kind = self.manifest.kinds[block.kind]
        names = [block.tensor(one.name) for step in kind.steps for one in step.linears]
        names += [step.matrix for step in kind.steps if step.op == "head"]
        return [self.manifest.matrices[name] for name in names]

    def _held(self, block: Block) -> int:
        """A whole block's weights, unpacked."""
        return sum(
            m.rows * m.columns * F32
            + (m.rows * m.columns // m.group_size * F32 if m.layout == "affine" else 0)
            for m in self._matrices(block)
        )

    def _workspace(self, block: Block, kind: Kind, op: Op, lanes: int) -> int:
        """What a step holds beside the values it takes and makes."""
        step = kind.steps[op.step]
        if step.op == "glue":
            direction = "vjp" if op.backward else "forward"
            length = graph_length(step, self.work.rung)
            graph = self.manifest.graphs[graph_key(step.graph, direction, length)]
            tile = sum(math.prod(shape) for shape in graph.outputs) * F32
            return graph.workspace_bytes + (tile if length < self.work.rung else 0)
        if step.op == "attention":
            return self._attention(kind, step, op.backward)
        if step.op == "linear":
            matrices = [
                self.manifest.matrices[block.tensor(linear.name)]
                for linear in step.linears
                if op.backward or linear.output in op.wanted
            ]
            if op.backward:
                summed = self.work.rung * matrices[0].columns * F32 if len(matrices) > 1 else 0
                return summed + max(self._linear_backward(matrix) for matrix in matrices)
            return max(self._linear_forward(matrix, lanes) for matrix in matrices)
        if step.op == "embedding":
            matrix = self.manifest.matrices[step.matrix]
            return 3 * self.work.rung * matrix.columns * F32
        return 0

    def _tile(self, matrix: Matrix, values: int) -> int:
        """A tile while it is unpacked: words, flipped and masked words, codes and results."""
        values = min(values, matrix.rows * matrix.columns)
        words = 0 if self.work.arithmetic == "packed" else values * matrix.bits // 8
        return 3 * words + self._opened(matrix, values)

    def _opened(self, matrix: Matrix, values: int) -> int:
        """A tile ready to be multiplied: its words, scales and biases, or its values."""
        if self.work.arithmetic == "packed":
            share = values / (matrix.rows * matrix.columns)
            return int(matrix.nbytes * share) + 2 * values // matrix.group_size * F32
        return values * F32

    def _linear_forward(self, matrix: Matrix, lanes: int) -> int:
        """Beside the outputs: the inputs' halves, and a tile with what one lane makes of it."""
        rows = max(1, min(matrix.rows, self._tile_values // matrix.columns))
        return lanes * self.work.rung * matrix.columns * F32 + self._met(matrix, rows)

    def _linear_backward(self, matrix: Matrix) -> int:
        """Beside the result: the sum's halves, old and new, a part of dy and a tile."""
        x = self.work.rung * matrix.columns * F32
        first = max(1, min(matrix.rows, self._tile_values // matrix.columns))
        second = min(first, matrix.rows - first)
        return max(self._met(matrix, first), x + self._met(matrix, second), x)

    def _met(self, matrix: Matrix, rows: int) -> int:
        """A tile of so many rows, and the part of y or dy that belongs to it."""
        part = self.work.rung * rows * F32 if rows < matrix.rows else 0
        return part + self._tile(matrix, rows * matrix.columns)

    def off_heap(self, index: int) -> int:
        """Of a block's peak: the tile in hand, and logits that are too large for the heap."""
        tile = self.largest_tile()
        block = self.manifest.blocks[index]
        step = self.manifest.kinds[block.kind].steps[-1]
        logits = self.work.rung * self.chunk_rows * F32
        if step.op != "head" or logits <= MOST_HEAP_BLOCK_BYTES:
            return tile
        matrix = self.manifest.matrices[step.matrix]
        return max(tile, self._opened(matrix, self.chunk_rows * matrix.columns) + 3 * logits)

    def largest_tile(self) -> int:
        """The most that one tile of a matrix takes while it is unpacked."""
        matrices = self.manifest.matrices.values()
        return max(self._tile(matrix, self._tile_values) for matrix in matrices)

    @property
    def _tile_values(self) -> int:
        """How many values a linear step opens at once: packed matrices are opened whole."""
        return 1 << 62 if self.work.arithmetic == "packed" else self.sizes.tile_values

    def _attention(self, kind: Kind, step: Step, backward: bool) -> int:
        _, heads, length, _ = at_rung(kind.values[step.inputs[0]], self.work.rung)
        block = min(length, self.sizes.query_block)
        keys = length if step.window is None else min(length, step.window + block)
        mask = block * keys * F32
        scores = heads * mask
        q, k, v = (self._size(kind, name) for name in step.inputs)
        if backward:
            return mask + 4 * scores + 2 * (k + v) + q + 3 * q * block // length
        return mask + 3 * scores + k + v + q

    def _head(self, kind: Kind, step: Step, lanes: int) -> int:
        h = self._size(kind, step.inputs[0])
        matrix = self.manifest.matrices[step.matrix]
        chunk = self.work.rung * self.chunk_rows * F32
        values = self.chunk_rows * matrix.columns
        gradient = 3 * h if self.work.method == "mebp" else 0
        while_scoring = self._opened(matrix, values) + 3 * chunk
        waiting = (2 * lanes + 1) * h  # h and its halves, and one lane's rows of the targets
        return waiting + gradient + max(self._tile(matrix, values), while_scoring)
