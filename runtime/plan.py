"""What a budget buys: tile and block sizes, the allocator's cache, and the peak they lead to.

Pure arithmetic over the manifest: sizes of values along the schedules of `runtime.schedule`, plus
what each kernel holds while it runs. No figure is fitted to a model; the constants describe the
process (`BASE_BYTES`) and the kernels' own code (how many copies of a tile exist at once).
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ondevice.errors import BudgetError, UsageError
from ondevice.manifest import Block, Kind, Manifest, Matrix, Step, at_rung, graph_key
from ondevice.units import format_bytes
from runtime.schedule import Op, backward_schedule, forward_schedule, lse

F32 = 4
# Interpreter, NumPy, MLX, OpenBLAS's packing buffers: measured on Linux x86-64; a guess on macOS.
BASE_BYTES = {"linux": 30_000_000, "darwin": 60_000_000}
MANIFEST_FACTOR = 300  # bytes of Python objects per tensor, graph and value of the manifest
CACHE_PER_LIVE = 1.5  # buffers are reused at nearly equal sizes only; more than this is never kept
EVAL_LANES = 8  # rows evaluated side by side, where they fit
MEZO_LANES = 16  # hidden states that MeZO moves side by side, where they fit
READ_AHEAD_BYTES = 1_100_000  # the prefetch thread's buffer and stack
MARGIN = 0.98  # of the budget that a plan may predict


@dataclass(frozen=True)
class Sizes:
    """The settings a plan chooses among, from generous to frugal."""

    tile_values: int
    query_block: int
    cache_bytes: int
    hold: bool = False  # a block's unpacked weights, as long as the block runs


# MeBP as its paper describes it: a whole layer unpacked at once, all scores and all logits
PAPER = Sizes(1 << 62, 1 << 30, 128_000_000, hold=True)
LEVELS = (
    Sizes(4 << 20, 256, 128_000_000),
    Sizes(4 << 20, 256, 96_000_000),
    Sizes(4 << 20, 128, 64_000_000),
    Sizes(2 << 20, 128, 48_000_000),
    Sizes(2 << 20, 64, 32_000_000),
    Sizes(1 << 20, 64, 24_000_000),
    Sizes(1 << 20, 64, 12_000_000),
    Sizes(512 << 10, 32, 8_000_000),
    Sizes(256 << 10, 16, 4_000_000),
)


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


@dataclass(frozen=True)
class Plan:
    """A plan, in bytes; `predicted_peak_bytes` is the sum of what is alive at the worst moment."""

    budget_bytes: int
    predicted_peak_bytes: int
    minimum_bytes: int
    base_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    live_bytes: int
    cache_bytes: int
    scratch_disk_bytes: int
    rung: int
    rows: int
    accumulation: int
    arithmetic: str
    tile_values: int
    query_block: int
    chunk_rows: int
    hold: bool
    prefetch: bool
    lanes: int  # hidden states of training side by side in a block's forward
    eval_lanes: int
    blocks: tuple[BlockPlan, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_rung(manifest: Manifest, length: int) -> int:
    """The smallest rung that holds `length` tokens.

    Raises:
        UsageError: the ladder ends below it.
    """
    for rung in manifest.rungs:
        if rung >= length:
            return rung
    raise UsageError(
        f"--max-seq-length {length} > {manifest.rungs[-1]}, the longest that the bundle has graphs "
        f"for; export it again with --seq-lens {','.join(map(str, (*manifest.rungs, length)))}"
    )


def make_plan(manifest: Manifest, work: Work, budget_bytes: int) -> Plan:
    """The most generous plan that fits.

    Raises:
        BudgetError: not even the most frugal one fits; the message has the numbers and a way out.
    """
    levels = (PAPER,) if work.layout == "paper" else LEVELS
    minimum = predict(manifest, work, levels[-1], budget_bytes, 0).predicted_peak_bytes
    smallest = math.ceil(minimum / MARGIN)
    for level in levels:
        for lanes in _lane_choices(work):
            plan = predict(manifest, work, level, budget_bytes, smallest, lanes)
            if plan.predicted_peak_bytes <= MARGIN * budget_bytes:
                return plan
    raise BudgetError(_refusal(manifest, work, budget_bytes, smallest))


def _lane_choices(work: Work) -> tuple[int, ...]:
    """How many hidden states may travel side by side, most first; MeBP's follow from its plan."""
    most = {"mebp": 1, "mezo": min(MEZO_LANES, work.hidden_states), "eval": EVAL_LANES}[work.method]
    fewest = 2 if work.method == "mezo" else 1
    return (most, *(n for n in (8, 4, 2, 1) if fewest <= n < most))


def _refusal(manifest: Manifest, work: Work, budget_bytes: int, smallest: int) -> str:
    name = manifest.provenance.get("name", manifest.family)
    rounded = math.ceil(smallest / 1e6) * 1_000_000
    text = (
        f"budget {format_bytes(budget_bytes)} < {format_bytes(rounded)} needed by {name} at "
        f"{work.rung} tokens; the smallest that fits is {format_bytes(rounded)}"
    )
    for rung in reversed([r for r in manifest.rungs if r < work.rung]):
        shorter = Work(**{**asdict(work), "rung": rung})
        level = PAPER if work.layout == "paper" else LEVELS[-1]
        frugal = predict(manifest, shorter, level, budget_bytes, 0)
        if frugal.predicted_peak_bytes <= MARGIN * budget_bytes:
            return f"{text}, or use --max-seq-length {rung}"
    if work.accumulation > 1 and work.method == "mebp":
        return f"{text}; without --grad-accumulation fewer gradients are held"
    return text


def predict(
    manifest: Manifest,
    work: Work,
    sizes: Sizes,
    budget_bytes: int,
    minimum_bytes: int,
    lanes: int | None = None,
) -> Plan:
    """The peak of one choice of sizes; `lanes` defaults to the fewest that the method can do."""
    model = _Model(manifest, work, sizes)
    lanes = _lane_choices(work)[-1] if lanes is None else lanes
    blocks = tuple(model.block(index, lanes) for index in range(len(manifest.blocks)))
    live = max(max(b.forward_bytes, b.backward_bytes) for b in blocks)
    most = max(EVAL_LANES, work.rows)
    eval_lanes = lanes if work.method == "eval" else model.free_lanes(live, lanes, most)
    if work.method == "mebp":
        lanes = min(eval_lanes, work.rows)
    adapters = model.adapter_bytes()
    gradients = model.gradient_bytes()
    counted = len(manifest.matrices) + len(manifest.graphs) + len(manifest.vectors)
    base = BASE_BYTES["darwin" if sys.platform == "darwin" else "linux"]
    base += counted * MANIFEST_FACTOR + (READ_AHEAD_BYTES if work.prefetch else 0)
    slots = {"mebp": len(manifest.blocks), "mezo": 1, "eval": 0}[work.method]
    row_bytes = work.rung * manifest.hidden_size * F32
    cached = min(sizes.cache_bytes, int(CACHE_PER_LIVE * live))
    moments = 2 * adapters if work.method == "mebp" and work.optimizer == "adamw" else 0
    return Plan(
        budget_bytes=budget_bytes,
        predicted_peak_bytes=base + adapters + gradients + live + cached,
        minimum_bytes=minimum_bytes,
        base_bytes=base,
        adapter_bytes=adapters,
        gradient_bytes=gradients,
        live_bytes=live,
        cache_bytes=cached,
        scratch_disk_bytes=slots * work.hidden_states * row_bytes + moments,
        rung=work.rung,
        rows=work.rows,
        accumulation=work.accumulation,
        arithmetic=work.arithmetic,
        tile_values=sizes.tile_values,
        query_block=sizes.query_block,
        chunk_rows=model.chunk_rows,
        hold=sizes.hold,
        prefetch=work.prefetch,
        lanes=lanes,
        eval_lanes=eval_lanes,
        blocks=blocks,
    )


class _Model:
    """The bytes alive while each block of a manifest runs under given sizes."""

    def __init__(self, manifest: Manifest, work: Work, sizes: Sizes) -> None:
        self.manifest, self.work, self.sizes = manifest, work, sizes
        width = manifest.hidden_size
        self.chunk_rows = max(64, min(manifest.vocab_size, sizes.tile_values // width))

    def adapter_bytes(self) -> int:
        return sum(self._block_adapters(block) for block in self.manifest.layers)

    def gradient_bytes(self) -> int:
        """All blocks' gradients where micro-batches accumulate, else the largest block's.

        MeZO has none, but for one block z and two perturbed copies per query on its way.
        """
        per_block = [self._block_adapters(block) for block in self.manifest.layers]
        if self.work.method == "eval":
            return 0
        if self.work.method == "mezo":
            on_the_way = min(self.work.queries, 2 + MEZO_LANES // 2)
            return max(per_block) * (2 * on_the_way + 2)
        held = sum(per_block) if self.work.accumulation > 1 else 0
        return held + max(per_block) * (2 if self.work.rows > 1 else 1)

    def _block_adapters(self, block: Block) -> int:
        rank = int(self.manifest.lora["rank"])
        matrices = (
            self.manifest.matrices[block.tensor(name)] for name in self.manifest.adapted(block)
        )
        return sum((m.rows + m.columns) * rank * F32 for m in matrices)

    def free_lanes(self, live: int, at_least: int, most: int) -> int:
        """How many hidden states fit side by side into `live` bytes in every block's forward."""
        for lanes in range(most, at_least, -1):
            blocks = (self.forward(index, lanes) for index in range(len(self.manifest.blocks)))
            if max(blocks) <= live:
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
            head = kind.steps[-1]
            whole = lanes * self._size(kind, kind.input)
            found = max(found, whole + self._head(kind, head, lanes))
        return found

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
        held = self._held(block, kind) if self.sizes.hold else 0
        for op in schedule:
            step = kind.steps[op.step]
            made = {f"~{name}" for name in op.wanted} if op.backward else set(op.wanted)
            if step.op == "attention" and not op.backward and f"~{kind.output}" in alive:
                made.add(lse(step))
            before = sum(self._size(kind, name) for name in alive)
            fresh = sum(self._size(kind, name) for name in made)
            work = self._workspace(block, kind, op, lanes)
            peak = max(peak, held + lanes * (before + fresh) + work)
            alive |= made
            alive -= set(op.frees)
        return peak

    def _held(self, block: Block, kind: Kind) -> int:
        """A whole block's weights, unpacked."""
        names = [block.tensor(one.name) for step in kind.steps for one in step.linears]
        names += [step.matrix for step in kind.steps if step.op == "head"]
        matrices = (self.manifest.matrices[name] for name in names)
        return sum(m.rows * m.columns * F32 for m in matrices)

    def _workspace(self, block: Block, kind: Kind, op: Op, lanes: int) -> int:
        """What a step holds beside the values it takes and makes."""
        step = kind.steps[op.step]
        if step.op == "glue":
            direction = "vjp" if op.backward else "forward"
            key = graph_key(step.graph, direction, self.work.rung)
            return self.manifest.graphs[key].workspace_bytes
        if step.op == "attention":
            return self._attention(kind, step, op.backward)
        if step.op == "linear":
            matrices = [
                self.manifest.matrices[block.tensor(linear.name)]
                for linear in step.linears
                if op.backward or linear.output in op.wanted
            ]
            if op.backward:
                return max(self._linear_backward(matrix) for matrix in matrices)
            return max(self._linear_forward(matrix, lanes) for matrix in matrices)
        if step.op == "embedding":
            matrix = self.manifest.matrices[step.matrix]
            return 3 * self.work.rung * matrix.columns * F32
        return 0

    def _tile(self, matrix: Matrix, values: int) -> int:
        """A tile while it is unpacked: words, flipped and masked words, codes and results."""
        if self.work.arithmetic == "packed":
            return matrix.nbytes + 2 * matrix.rows * matrix.columns // matrix.group_size * F32
        values = min(values, matrix.rows * matrix.columns)
        words = values * matrix.bits // 8
        columns = values * F32
        return 2 * words + columns + columns // (2 if matrix.bits == 4 else 1)

    def _linear_forward(self, matrix: Matrix, lanes: int) -> int:
        x = lanes * self.work.rung * matrix.columns * F32
        y = self.work.rung * matrix.rows * F32
        tiled = matrix.rows * matrix.columns > self.sizes.tile_values
        while_tiling = x + self._tile(matrix, self.sizes.tile_values)
        return max(while_tiling, y if tiled else 0) + (y if tiled else 0)

    def _linear_backward(self, matrix: Matrix) -> int:
        x = self.work.rung * matrix.columns * F32
        rows = max(1, min(matrix.rows, self.sizes.tile_values // matrix.columns))
        part = self.work.rung * rows * F32
        halves = 2 * x
        return halves + max(x, part + self._tile(matrix, self.sizes.tile_values))

    def _attention(self, kind: Kind, step: Step, backward: bool) -> int:
        _, heads, length, _ = at_rung(kind.values[step.inputs[0]], self.work.rung)
        block = min(length, self.sizes.query_block)
        keys = length if step.window is None else min(length, step.window + block)
        scores = heads * block * keys * F32
        q, k, v = (self._size(kind, name) for name in step.inputs)
        if backward:
            return 4 * scores + 2 * (k + v) + q
        return 3 * scores + k + v + q

    def _head(self, kind: Kind, step: Step, lanes: int) -> int:
        h = self._size(kind, step.inputs[0])
        matrix = self.manifest.matrices[step.matrix]
        chunk = self.work.rung * self.chunk_rows * F32
        tile = self._tile(matrix, self.chunk_rows * matrix.columns)
        gradient = 3 * h if self.work.method == "mebp" else 0
        held = self._tile(matrix, matrix.rows * matrix.columns) if self.sizes.hold else 0
        return lanes * 3 * h + gradient + tile + 2 * chunk + held
