"""What a step of a program holds while it runs, beside the values that it takes and makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ondevice.bundle.manifest import (
    Block,
    BlockType,
    Manifest,
    Matrix,
    Step,
    graph_key,
    graph_length,
    shape_at,
)
from runtime.lowering.schedule import Op
from runtime.lowering.token_tiles import GATED_SCRATCH_BYTES, WHOLE, rows_at_once
from runtime.system.heap import MOST_HEAP_BLOCK_BYTES

F32 = 4


@dataclass(frozen=True)
class Sizes:
    """The settings a plan chooses among, from generous to frugal."""

    tile_values: int
    query_block: int
    cache_bytes: int
    hold: bool = False  # a block's unpacked weights, as long as the block runs
    most_tokens: int = WHOLE  # that an MLP takes at once


@dataclass(frozen=True)
class Work:
    """What is to be planned: a micro-batch's shape and what the method keeps.

    `method` is mebp, mezo or eval; `layout` is "budget" (what this planner is for) or "paper".
    """

    bucket: int
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


class Workspace:
    """The bytes that the steps of a manifest's programs hold under given sizes."""

    def __init__(self, manifest: Manifest, work: Work, sizes: Sizes) -> None:
        self.manifest, self.work, self.sizes = manifest, work, sizes
        chunk = rows_at_once(manifest.vocab_size, manifest.hidden_size, sizes.tile_values)
        self.chunk_rows = max(64, chunk)

    def of(self, block: Block, block_type: BlockType, op: Op, lanes: int, tokens: int) -> int:
        """What a step over so many tokens holds; a `tiled` one's steps are asked for themselves."""
        step = block_type.steps[op.step]
        if step.op == "elementwise":
            return self._elementwise(step, op, tokens)
        if step.op == "attention":
            return self._attention(block_type, step, op.backward)
        if step.op == "linear":
            return self._linear(block, step, op, lanes, tokens)
        if step.op == "embedding":
            matrix = self.manifest.matrices[step.matrix]
            return 3 * tokens * matrix.columns * F32
        return 0

    def head(self, block_type: BlockType, lanes: int) -> int:
        """A pass over the vocabulary, with the hidden states and their gradients."""
        step = block_type.steps[-1]
        h = math.prod(shape_at(block_type.values[step.inputs[0]], self.work.bucket)) * F32
        matrix = self.manifest.matrices[step.matrix]
        gradient = h if self.work.method == "mebp" else 0
        waiting = 3 * lanes * h  # h and its halves, and the rows of the targets
        unpacking = self._tile(matrix, self.chunk_rows * matrix.columns)
        joined = gradient  # of its halves, when the last chunk has gone
        return waiting + gradient + max(unpacking, self._scoring(matrix), joined)

    def by_kernel(self, step: Step) -> bool:
        """Whether a kernel runs in place of a glue step's graphs."""
        return bool(step.gated) and self.manifest.device == "cpu"

    def off_heap(self, block_type: BlockType) -> int:
        """What is no heap's: the tile in hand, and logits that are too large for it."""
        tile, step = self.largest_tile(), block_type.steps[-1]
        if step.op != "head" or self._logits() <= MOST_HEAP_BLOCK_BYTES:
            return tile
        return max(tile, self._scoring(self.manifest.matrices[step.matrix]))

    def _logits(self) -> int:
        return self.work.bucket * self.chunk_rows * F32

    def _scoring(self, matrix: Matrix) -> int:
        """A chunk of the vocabulary, and its logits, which become their exponentials."""
        return self._opened(matrix, self.chunk_rows * matrix.columns) + self._logits()

    def largest_tile(self) -> int:
        """The most that one tile of a matrix takes while it is unpacked."""
        matrices = self.manifest.matrices.values()
        return max(self._tile(matrix, self._rows(matrix) * matrix.columns) for matrix in matrices)

    def _rows(self, matrix: Matrix) -> int:
        """How many rows a linear step opens at once: packed matrices are opened whole."""
        values = WHOLE if self.work.arithmetic == "packed" else self.sizes.tile_values
        return rows_at_once(matrix.rows, matrix.columns, values)

    def _elementwise(self, step: Step, op: Op, tokens: int) -> int:
        """A graph's own values and results that nobody wants; run by tiles, all results."""
        direction = "vjp" if op.backward else "forward"
        length = graph_length(step, self.work.bucket)
        graph = self.manifest.graphs[graph_key(step.graph, direction, length)]
        made = step.vjp_outputs if op.backward else step.outputs
        if self.by_kernel(step):
            value = math.prod(graph.outputs[0]) * tokens // length * F32
            return GATED_SCRATCH_BYTES + (len(made) - len(op.wanted)) * value
        same = step.vjp_same if op.backward else ("",) * len(made)
        held = {one or name for name, one in zip(made, same, strict=True) if name in op.wanted}
        results = sum(
            math.prod(shape) * F32
            for name, one, shape in zip(made, same, graph.outputs, strict=True)
            if not one and (length < tokens or name not in held)
        )
        return graph.workspace_bytes + results

    def _linear(self, block: Block, step: Step, op: Op, lanes: int, tokens: int) -> int:
        matrices = [
            self.manifest.matrices[block.tensor(linear.name)]
            for linear in step.linears
            if op.backward or linear.output in op.wanted
        ]
        if op.backward:
            summed = tokens * matrices[0].columns * F32 if len(matrices) > 1 else 0
            return summed + max(self._linear_backward(matrix, tokens) for matrix in matrices)
        return max(self._linear_forward(matrix, lanes, tokens) for matrix in matrices)

    def _tile(self, matrix: Matrix, values: int) -> int:
        """A tile while it is unpacked: words, flipped and masked words, codes and results.

        And its scales: as they are, and of 4 bits a sixteenth of them for each half.
        """
        values = min(values, matrix.rows * matrix.columns)
        opened = self._opened(matrix, values)
        if self.work.arithmetic == "packed":
            return opened
        scales = (3 if matrix.bits == 4 else 1) * _per_group(matrix, values)
        return 3 * values * matrix.bits // 8 + scales + opened

    def _opened(self, matrix: Matrix, values: int) -> int:
        """A tile ready to be multiplied: its words, scales and biases, or its values and shift."""
        if self.work.arithmetic == "packed":
            share = values / (matrix.rows * matrix.columns)
            return int(matrix.nbytes * share) + 2 * _per_group(matrix, values)
        return values * F32 + (0 if matrix.biases is None else _per_group(matrix, values))

    def _linear_forward(self, matrix: Matrix, lanes: int, tokens: int) -> int:
        """Beside the outputs: the inputs' halves, and a tile, unpacked or met by one lane."""
        rows = self._rows(matrix)
        values = rows * matrix.columns
        tile = max(self._tile(matrix, values), self._met(matrix, rows, tokens))
        return lanes * tokens * matrix.columns * F32 + tile

    def _linear_backward(self, matrix: Matrix, tokens: int) -> int:
        """Beside the result: a tile as it is unpacked and its part of dy; then the halves."""
        rows = self._rows(matrix)
        halves = tokens * matrix.columns * F32
        return max(
            self._tile(matrix, rows * matrix.columns) + self._part(matrix, rows, tokens), halves
        )

    def _met(self, matrix: Matrix, rows: int, tokens: int) -> int:
        """An open tile of so many rows, and the part of y or dy that belongs to it."""
        return self._part(matrix, rows, tokens) + self._opened(matrix, rows * matrix.columns)

    def _part(self, matrix: Matrix, rows: int, tokens: int) -> int:
        """The part of y or dy that belongs to so many rows; all of them need no part."""
        return tokens * rows * F32 if rows < matrix.rows else 0

    def _attention(self, block_type: BlockType, step: Step, backward: bool) -> int:
        q, k, v = (shape_at(block_type.values[name], self.work.bucket) for name in step.inputs)
        heads, length = q[1], q[2]
        block = min(length, self.sizes.query_block)
        keys = length if step.window is None else min(length, step.window + block)
        mask = block * keys * F32
        scores = heads * mask
        queries, others = math.prod(q) * F32, (math.prod(k) + math.prod(v)) * F32
        part = queries * block // length
        met = mask + scores + part + others // 2  # and k or v, in rows that a product can take
        return met + max(scores, part) if backward else met


def _per_group(matrix: Matrix, values: int) -> int:
    """Bytes of one float32 for each group of so many values."""
    return values // matrix.group_size * F32
