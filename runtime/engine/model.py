"""The forward and backward of a bundle's blocks at one sequence bucket, as methods call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays, arrays_for, quiet
from runtime.arrays.compiled_products import CompiledProducts
from runtime.arrays.matrices import Matrices, Place
from runtime.arrays.packed_rows import PackedRows
from runtime.arrays.products import products_for
from runtime.arrays.profile import Profile
from runtime.arrays.stored import Block, Matrix
from runtime.arrays.stored_codes import Mapped
from runtime.arrays.tile_products import ReadyTile
from runtime.arrays.values import Gradients, Loras, Values, move_of
from runtime.arrays.weight_source import WeightSource
from runtime.bundle.store import Bundle
from runtime.engine.executor import Executor
from runtime.engine.graphs import Graphs
from runtime.machine.openblas import blas_threads
from runtime.operations.attention import STARTS
from runtime.operations.base import Operation
from runtime.operations.embedding_kernel import LOOKED_UP, POSITIONS, TOKENS
from runtime.operations.head_kernel import HeadKernel, HeadResult, Targets
from runtime.operations.kernel import Tools
from runtime.operations.logits_kernel import LogitsKernel, Shaping
from runtime.operations.program import Program
from runtime.operations.values import COUNT, POSITION, gradient_of
from runtime.plan.lower import LoweredBlock, LoweredModel

Positions = npt.NDArray[np.int64]
"""Places in a row, in increasing order."""
Offsets = npt.NDArray[np.int64]
"""Where each row of a packed sequence begins (k,), and where the last one ends: k + 1 numbers."""


@dataclass(frozen=True)
class Model:
    """The lowered blocks of a bundle, ready to run.

    `materialized` holds the tiles that stay dequantized. Several models (of other buckets) may
    share it, as they share `graphs`. `in_place` multiplies decoded tokens by weights where they
    lie, and compiled code all others by the `mapped` ones if they are given.
    """

    bundle: Bundle
    weights: WeightSource
    lowered: LoweredModel
    graphs: Graphs
    profile: Profile = field(default_factory=Profile)
    materialized: dict[Place, ReadyTile] = field(default_factory=dict)
    in_place: PackedRows | None = None
    mapped: Mapped | None = None

    @property
    def bucket(self) -> int:
        """The tokens that every row is padded up to."""
        return self.lowered.bucket

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.bundle.manifest.blocks

    @cached_property
    def matrices(self) -> Matrices:
        manifest, execution = self.bundle.manifest, self.lowered.execution
        arrays = arrays_for(manifest.device, execution.one_evaluation)
        if self.mapped is None:
            products = products_for(execution.compute_dtype, arrays)
        else:
            products = CompiledProducts(arrays, blas_threads(), execution.compute_dtype)

        def by_offset(counts: Mapping[str, int]) -> dict[int, int]:
            return {manifest.matrices[name].packed.offset: n for name, n in counts.items()}

        return Matrices(
            self.weights,
            arrays,
            execution.packed,
            by_offset(execution.tile_rows),
            by_offset(execution.tile_columns),
            self.profile,
            self.materialized,
            products,
            self.in_place,
            by_offset(execution.stacked_rows),
            self.mapped,
        )

    @property
    def arrays(self) -> Arrays:
        return self.matrices.arrays

    @cached_property
    def exact_matrices(self) -> Matrices:
        """The matrices for a head, whose logits a GPU would round to bfloat16."""
        if self.tools.dtype == mx.float32:
            return self.matrices
        return replace(self.matrices, other_products=None)

    @cached_property
    def tools(self) -> Tools:
        return Tools(
            self.bundle.manifest.matrices,
            self.weights,
            self.matrices,
            self.graphs,
            self.arrays,
            self.lowered.execution,
            self.profile,
        )

    @cached_property
    def executor(self) -> Executor:
        return Executor.of(self.tools)

    @cached_property
    def head_name(self) -> str:
        """The name of the matrix that turns hidden states into logits."""
        (name,) = self._head.matrices(self.blocks[-1].tensor)
        return name

    @property
    def head_matrix(self) -> Matrix:
        """The matrix that turns hidden states into logits."""
        return self.bundle.manifest.matrices[self.head_name]

    @cached_property
    def _head(self) -> Operation:
        head = self._lowered[self.blocks[-1]].head
        assert head is not None
        return head

    def shaping(self, loras: Loras) -> Shaping:
        """What becomes of a head's products, as a batch lane sees it."""
        names = self._head.vectors(self.blocks[-1].tensor)
        bias = next((self.tools.vector(name, loras) for name in names), None)
        return Shaping(bias, self._head.logits_cap, loras.get(self.head_name))

    @cached_property
    def _lowered(self) -> dict[Block, LoweredBlock]:
        return {lowered_block.block: lowered_block for lowered_block in self.lowered.blocks}

    def embed(
        self,
        tokens: npt.NDArray[np.int64],
        loras: Loras | None = None,
        offsets: Offsets | None = None,
        first: int = 0,
    ) -> mx.array:
        """Hidden states (1, bucket, D) of tokens (T,), padded up to the bucket.

        `offsets` divide a sequence of packed rows; `first` is the position of the first token of
        one row.
        """
        values = self._placed(tokens, offsets, first)
        return self._forward(
            self._lowered[self.blocks[0]], [values], [{} if loras is None else loras]
        )[0]

    def embed_backward(
        self,
        tokens: npt.NDArray[np.int64],
        dy: mx.array,
        loras: Loras,
        gradients: Gradients,
        offsets: Offsets | None = None,
    ) -> None:
        """Add the gradients of the embedding's adapter to `gradients`, in place if they are there.

        dy (1, bucket, D) is the gradient of the hidden states that `embed` made of the tokens.
        """
        lowered, values = self._lowered[self.blocks[0]], self._placed(tokens, offsets)
        values |= {LOOKED_UP: values[TOKENS], gradient_of(lowered.program.output): dy}
        del dy
        self.executor.reverse(lowered, lowered.backward, self.bucket, values, loras, gradients)
        self.arrays.finish(gradients)

    def _placed(
        self, tokens: npt.NDArray[np.int64], offsets: Offsets | None, first: int = 0
    ) -> Values:
        """The values with which the embedding begins: padded tokens, and their places."""
        padded, places = np.zeros(self.bucket, np.int64), np.zeros(self.bucket, np.int64)
        padded[: len(tokens)] = tokens
        places[: len(tokens)] = np.arange(first, first + len(tokens))
        for start, stop in pairwise(() if offsets is None else offsets.tolist()):
            places[start:stop] = np.arange(stop - start)
        return {TOKENS: mx.array(padded), POSITIONS: mx.array(places)}

    def forward(
        self, block: Block, x: mx.array, loras: Loras, offsets: Offsets | None = None
    ) -> mx.array:
        """A layer's output (1, bucket, D); `offsets` divide a sequence of packed rows."""
        return self.forward_lanes(block, [x], [loras], [offsets])[0]

    def forward_lanes(
        self,
        block: Block,
        xs: list[mx.array],
        loras: Sequence[Loras],
        offsets: Sequence[Offsets | None] | None = None,
    ) -> list[mx.array]:
        """A layer's outputs (1, bucket, D) of several inputs, each with its adapters.

        Every tile of the weights is read and dequantized once and serves all of them; none of the
        results depends on the others. `xs` is emptied. `offsets` of an input that is not None
        divide it into packed rows.
        """
        lowered = self._lowered[block]
        return self._forward(lowered, self._lanes(lowered.program, xs, offsets), loras)

    def _lanes(
        self, program: Program, xs: list[mx.array], offsets: Sequence[Offsets | None] | None
    ) -> list[Values]:
        """The values with which a layer's forward begins; `xs` is emptied."""
        of_lanes = offsets or [None] * len(xs)
        pairs = zip(xs, of_lanes, strict=True)
        lanes: list[Values] = [{program.input: x, **self._starts(of_lane)} for x, of_lane in pairs]
        xs.clear()
        return lanes

    def decode_lanes(
        self,
        block: Block,
        xs: list[mx.array],
        loras: Loras,
        positions: Sequence[int],
        counts: Sequence[int],
        cache: Values,
    ) -> list[mx.array]:
        """A layer's outputs (1, bucket, D) of parts of one sequence, in order; `xs` is emptied.

        `positions` are those of the first token of each part, `counts` how many of its tokens are
        not padding. `cache` holds what the layer keeps of earlier tokens, such as their keys and
        values, to which those of these tokens are added.
        """
        lowered = self._lowered[block]
        lanes: list[Values] = [
            {
                lowered.program.input: x,
                POSITION: mx.array(position, mx.int32),
                COUNT: mx.array(count, mx.int32),
                **cache,
            }
            for x, position, count in zip(xs, positions, counts, strict=True)
        ]
        xs.clear()
        return self._forward(lowered, lanes, [loras] * len(lanes))

    def new_cache(self) -> dict[Block, Values]:
        """The key-value cache of a sequence of no tokens, by layer."""
        cache = {
            layer.block: {name: mx.zeros(shape) for name, shape in layer.program.cached.items()}
            for layer in self.lowered.layers
        }
        mx.eval(cache)
        blocks = {block.name: block for block in cache}
        for layer in self.lowered.layers:
            for name, owner in layer.program.borrowed.items():
                cache[layer.block][name] = cache[blocks[owner]][name]
        return cache

    def logits(self, h: mx.array, loras: Loras) -> npt.NDArray[np.float32]:
        """The logits (V,) of the token after the hidden state h (1, D)."""
        with self.profile.span("head"):
            return LogitsKernel(self.matrices).run(h, self.head_matrix, self.shaping(loras))

    def _starts(self, offsets: Offsets | None) -> Values:
        """Where packed rows start, for attention; padding is a row of its own. One row has none."""
        if offsets is None:
            return {}
        lengths = np.diff(offsets, append=self.bucket)
        starts = mx.array(np.repeat(offsets, lengths).astype(np.int32))
        return {STARTS: starts}

    @quiet
    def _forward(
        self, lowered: LoweredBlock, lanes: list[Values], loras: Sequence[Loras]
    ) -> list[mx.array]:
        self.executor.forward(lowered, lowered.forward, self.bucket, lanes, loras)
        outputs = [values[lowered.program.output] for values in lanes]
        self.arrays.finish(outputs)
        return outputs

    def forward_keeping(
        self,
        block: Block,
        xs: list[mx.array],
        loras: Sequence[Loras],
        way: int,
        offsets: Sequence[Offsets | None] | None = None,
    ) -> tuple[list[mx.array], list[Values]]:
        """The results of `forward_lanes`, and of each input what spares `backward` recomputation.

        `way` is one of the layer's ways to keep values (`LoweredBlock.keeping`).
        """
        lowered = self._lowered[block]
        program, lanes = lowered.program, self._lanes(lowered.program, xs, offsets)
        self.executor.forward(lowered, lowered.keeping[way].forward, self.bucket, lanes, loras)
        ys = [values.pop(program.output) for values in lanes]
        for values in lanes:
            for name in (program.input, STARTS):
                values.pop(name, None)
        self.arrays.finish(ys, lanes)
        return ys, lanes

    def backward(
        self,
        block: Block,
        x: mx.array,
        dy: mx.array,
        loras: Loras,
        kept: tuple[int, Values] | None = None,
        offsets: Offsets | None = None,
    ) -> tuple[mx.array | None, Gradients]:
        """A layer's vjp at x (1, bucket, D): dx, and (dA, dB) per adapted matrix.

        dx is None in the first layer with an adapter, since nothing before it is trained. `kept`
        are the way and the values of `forward_keeping`, which are consumed. `offsets` divide a
        sequence of packed rows.
        """
        lowered = self._lowered[block]
        program = lowered.program
        values: Values = {program.input: x, gradient_of(program.output): dy}
        values |= self._starts(offsets)
        del x, dy
        schedule = lowered.backward
        if kept is not None:
            way, given = kept
            values.update(given)
            given.clear()
            schedule = lowered.keeping[way].backward
        gradients: Gradients = {}
        self.executor.reverse(lowered, schedule, self.bucket, values, loras, gradients)
        dx = values.get(gradient_of(program.input))
        self.arrays.finish(gradients if dx is None else (dx, gradients))
        return dx, gradients

    def hidden(self, x: mx.array, scored: Positions, loras: Loras | None = None) -> mx.array:
        """The head operation's input (N, D) at the positions `scored`, for x (1, bucket, D)."""
        lowered = self._lowered[self.blocks[-1]]
        (whole,) = self._forward(
            lowered, [{lowered.program.input: x}], [{} if loras is None else loras]
        )
        h = mx.take(mx.array(whole).squeeze(0), _indices(scored), axis=0)  # so that the rest can go
        h = h.astype(mx.float32)  # as the head takes it
        mx.eval(h)
        return h

    def losses(
        self,
        hs: Sequence[mx.array],
        targets: Sequence[Targets],
        gradient: bool,
        predictions: bool = False,
        loras: Sequence[Loras] = (),
    ) -> list[HeadResult]:
        """Losses of hidden states h (N, D) against targets (N,), in one pass for all lanes."""
        backward = None if self.exact_matrices is self.matrices else self.matrices.products
        kernel = HeadKernel(self.exact_matrices, self.lowered.execution.chunk_rows, backward)
        with self.profile.span("head"):
            loras = loras or [{}] * len(hs)
            moves = [move_of(of_lane) for of_lane in loras]
            shapings = [self.shaping(of_lane) for of_lane in loras]
            matrix = self.head_matrix
            return kernel.run(hs, targets, matrix, gradient, predictions, moves, shapings)

    def head_gradients(
        self,
        hs: Sequence[mx.array],
        targets: Sequence[Targets],
        slopes: Sequence[mx.array],
        results: Sequence[HeadResult],
        loras: Loras,
        gradients: Gradients,
    ) -> None:
        """Add the gradients of the head's adapter to `gradients`, in place if they are there.

        `slopes` (N, 1) are those of the objective over the losses in `results`, of the hidden
        states h (N, D) against the targets (N,).
        """
        lora = loras[self.head_name]
        if self.head_name not in gradients:
            zeros = mx.zeros(lora.a.shape), mx.zeros(lora.b.shape)
            self.arrays.settle(zeros)
            gradients[self.head_name] = zeros
        kernel = HeadKernel(self.exact_matrices, self.lowered.execution.chunk_rows)
        log_sums = [result.log_sum for result in results]
        matrix, total = self.head_matrix, gradients[self.head_name]
        with self.profile.span("head"):
            kernel.adapter_gradients(
                hs, targets, slopes, log_sums, matrix, self.shaping(loras), total
            )

    def label_logits(self, h: mx.array, labels: Targets, loras: Loras) -> mx.array:
        """Logits (N, K) of chosen tokens (K,) for hidden states h (N, D), evaluated."""
        chosen = self.matrices.rows(self.head_matrix, labels, move_of(loras))
        shaping, products = self.shaping(loras), h @ chosen.T
        if shaping.lora is not None and (through := shaping.through_a(h, self.arrays)) is not None:
            products = products + through @ shaping.columns(labels)
        logits = shaping.of_rows(products, labels, self.arrays)
        mx.eval(logits)
        return logits

    def head_backward(self, x: mx.array, dh: mx.array, scored: Positions) -> mx.array:
        """dx (1, bucket, D) of the head block's input x, from dh (N, D) at positions `scored`."""
        lowered = self._lowered[self.blocks[-1]]
        program = lowered.program
        whole = mx.zeros((1, self.bucket, dh.shape[-1]), self.tools.dtype)
        whole[0, _indices(scored)] = dh
        mx.eval(whole)  # so that dh can go
        values: Values = {program.input: x, gradient_of(program.output): whole}
        del x, dh, whole
        self.executor.reverse(lowered, lowered.backward, self.bucket, values, {}, {})
        dx = values[gradient_of(program.input)]
        self.arrays.finish(dx)
        return dx

    def release(self, block: Block) -> None:
        """Free the block's mapped pages."""
        self.weights.release(block)

    def read_ahead(self, block: Block) -> None:
        """Begin to bring the block's weights near, unless they all stay dequantized."""
        if any(map(self.matrices.reads, self.bundle.manifest.matrices_of(block))):
            self.weights.read_ahead(block)


def _indices(positions: Positions) -> mx.array:
    return mx.array(positions.astype(np.int32))
