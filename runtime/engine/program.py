"""The blocks of a bundle at one bucket, forward and reversed: the only interface that methods see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ondevice.bundle.manifest import Block, BlockType
from ondevice.bundle.store import Bundle
from runtime.engine.executor import Executor, Gradients, Loras, Values
from runtime.engine.graphs import GraphRunner, Graphs
from runtime.engine.kernels.attention import AttentionKernel
from runtime.engine.kernels.head import HeadKernel, HeadResult, Targets
from runtime.engine.kernels.linear import LinearKernel
from runtime.engine.kernels.unpack import dense
from runtime.engine.profile import Profile
from runtime.lowering.token_tiles import WHOLE, fold, token_tile
from runtime.storage.weights import Weights


@dataclass(frozen=True)
class Program:
    """The blocks of a bundle at one bucket, ready to run; an MLP takes `most_tokens` at once."""

    bundle: Bundle
    weights: Weights
    bucket: int
    linear: LinearKernel
    attention: AttentionKernel
    head_kernel: HeadKernel
    profile: Profile = field(default_factory=Profile)
    most_tokens: int = WHOLE
    graphs: Graphs = field(default_factory=dict)

    @cached_property
    def _folded(self) -> dict[str, tuple[BlockType, Executor]]:
        """The block_types as they are run, and what runs them."""
        whole = Executor(
            self.bundle,
            self.weights,
            self.bucket,
            self.linear,
            self.attention,
            GraphRunner(self.bundle, self.bucket, self.graphs),
            self.profile,
        )
        found = {}
        for name, block_type in self.bundle.manifest.block_types.items():
            folded = fold(block_type)
            tokens = token_tile(folded, self.bucket, self.most_tokens)
            tiled = replace(whole, tile=replace(whole, tokens=tokens))
            found[name] = (folded, tiled) if tokens < self.bucket else (block_type, whole)
        return found

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.bundle.manifest.blocks

    def embed(self, tokens: npt.NDArray[np.int64]) -> mx.array:
        """Hidden states (1, bucket, D) of tokens (T,), padded up to the bucket."""
        block = self.blocks[0]
        block_type = self._block_type(block)
        padded = np.zeros(self.bucket, np.int64)
        padded[: len(tokens)] = tokens
        matrix = self.bundle.manifest.matrices[block_type.steps[0].matrix]
        with self.profile.span("embedding forward"):
            found = dense(self.weights.gather(matrix, padded), matrix.bits)[None]
            self.profile.settle(found)
        lanes = [{block_type.steps[0].outputs[0]: found}]
        del found
        return self._executor(block).forward(block, block_type, lanes, [{}], skip=1)[0]

    def forward(self, block: Block, x: mx.array, loras: Loras) -> mx.array:
        """A layer's output (1, bucket, D)."""
        return self.forward_lanes(block, [x], [loras])[0]

    def forward_lanes(
        self, block: Block, xs: list[mx.array], loras: Sequence[Loras]
    ) -> list[mx.array]:
        """A layer's outputs (1, bucket, D) of several inputs, each with adapters of its own.

        Every tile of the weights is read and unpacked once and serves all of them; none of the
        results depends on which others travel beside it. `xs` is emptied.
        """
        block_type = self._block_type(block)
        lanes = [{block_type.input: x} for x in xs]
        xs.clear()
        return self._executor(block).forward(block, block_type, lanes, loras)

    def forward_keeping(
        self, block: Block, x: mx.array, loras: Loras, input_too: bool
    ) -> tuple[mx.array, Values]:
        """A layer's output (1, bucket, D), and what `backward` would otherwise recompute."""
        block_type = self._block_type(block)
        values: Values = {block_type.input: x}
        del x
        y = self._executor(block).forward_keeping(block, block_type, values, loras, input_too)
        return y, values

    def backward(
        self,
        block: Block,
        x: mx.array,
        dy: mx.array,
        loras: Loras,
        input_too: bool,
        kept: Values | None = None,
    ) -> tuple[mx.array | None, Gradients]:
        """A layer's vjp at x (1, bucket, D): dx, where wanted, and (dA, dB) per adapted linear.

        `kept` is what `forward_keeping` has returned; it is spent.
        """
        block_type = self._block_type(block)
        values: Values = {block_type.input: x, f"~{block_type.output}": dy}
        del x, dy
        if kept is not None:
            values.update(kept)
            kept.clear()
        executor = self._executor(block)
        gradients = executor.backward(block, block_type, values, loras, input_too, kept is not None)
        return values.get(f"~{block_type.input}"), gradients

    def hidden(self, x: mx.array, scored: slice) -> mx.array:
        """What the head multiplies at the positions `scored`, (N, D), of its input (1, bucket, D)."""
        block = self.blocks[-1]
        block_type = self._block_type(block)
        (whole,) = self._executor(block).forward(block, block_type, [{block_type.input: x}], [{}])
        found = whole[0, scored] + 0.0  # a copy, so that the rest can go
        mx.eval(found)
        return found

    def losses(
        self,
        hs: Sequence[mx.array],
        targets: Sequence[Targets],
        gradient: bool,
        predictions: bool = False,
    ) -> list[HeadResult]:
        """The head over hidden states h (N, D) against targets (N,), in one pass for all lanes."""
        step = self._block_type(self.blocks[-1]).steps[-1]
        matrix = self.bundle.manifest.matrices[step.matrix]
        with self.profile.span("head"):
            return self.head_kernel.run(hs, targets, matrix, gradient, predictions)

    def head_backward(self, x: mx.array, dh: mx.array, scored: slice) -> mx.array:
        """dx (1, bucket, D) at the head's input x, from dh (N, D) at the positions `scored`."""
        block = self.blocks[-1]
        block_type = self._block_type(block)
        whole = mx.zeros((1, self.bucket, dh.shape[-1]))
        whole[0, scored] = dh
        values: Values = {block_type.input: x, f"~{block_type.steps[-1].inputs[0]}": whole}
        del x, whole
        self._executor(block).backward(block, block_type, values, {}, True)
        return values[f"~{block_type.input}"]

    def release(self, block: Block) -> None:
        """Give the block's mapped pages back, and what was unpacked of it."""
        self.linear.release()
        self.weights.release(block)

    def read_ahead(self, block: Block) -> None:
        """Begin to bring the block's weights into the system's file cache."""
        self.weights.read_ahead(block)

    def _block_type(self, block: Block) -> BlockType:
        return self._folded[block.type][0]

    def _executor(self, block: Block) -> Executor:
        return self._folded[block.type][1]
