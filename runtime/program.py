"""The blocks of a bundle at one rung, forward and reversed: the only interface that methods see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ondevice.bundle import Bundle
from ondevice.manifest import Block, Kind
from runtime.executor import Executor, Gradients, Loras, Values
from runtime.glue import GlueKernel, Graphs
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.head import HeadKernel, HeadResult, Targets
from runtime.kernels.linear import LinearKernel
from runtime.kernels.unpack import dense
from runtime.profile import Profile
from runtime.tiling import WHOLE, fold, token_tile
from runtime.weights import Weights


@dataclass(frozen=True)
class Program:
    """The blocks of a bundle at one rung, ready to run; an MLP takes `most_tokens` at once."""

    bundle: Bundle
    weights: Weights
    rung: int
    linear: LinearKernel
    attention: AttentionKernel
    head_kernel: HeadKernel
    profile: Profile = field(default_factory=Profile)
    most_tokens: int = WHOLE
    graphs: Graphs = field(default_factory=dict)

    @cached_property
    def _folded(self) -> dict[str, tuple[Kind, Executor]]:
        """The kinds as they are run, and what runs them."""
        whole = Executor(
            self.bundle,
            self.weights,
            self.rung,
            self.linear,
            self.attention,
            GlueKernel(self.bundle, self.rung, self.graphs),
            self.profile,
        )
        found = {}
        for name, kind in self.bundle.manifest.kinds.items():
            folded = fold(kind)
            tokens = token_tile(folded, self.rung, self.most_tokens)
            tiled = replace(whole, tile=replace(whole, tokens=tokens))
            found[name] = (folded, tiled) if tokens < self.rung else (kind, whole)
        return found

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.bundle.manifest.blocks

    def embed(self, tokens: npt.NDArray[np.int64]) -> mx.array:
        """Hidden states (1, rung, D) of tokens (T,), padded up to the rung."""
        block = self.blocks[0]
        kind = self._kind(block)
        padded = np.zeros(self.rung, np.int64)
        padded[: len(tokens)] = tokens
        matrix = self.bundle.manifest.matrices[kind.steps[0].matrix]
        with self.profile.span("embedding forward"):
            found = dense(self.weights.gather(matrix, padded), matrix.bits)[None]
            self.profile.settle(found)
        lanes = [{kind.steps[0].outputs[0]: found}]
        del found
        return self._executor(block).forward(block, kind, lanes, [{}], skip=1)[0]

    def forward(self, block: Block, x: mx.array, loras: Loras) -> mx.array:
        """A layer's output (1, rung, D)."""
        return self.forward_lanes(block, [x], [loras])[0]

    def forward_lanes(
        self, block: Block, xs: list[mx.array], loras: Sequence[Loras]
    ) -> list[mx.array]:
        """A layer's outputs (1, rung, D) of several inputs, each with adapters of its own.

        Every tile of the weights is read and unpacked once and serves all of them; none of the
        results depends on which others travel beside it. `xs` is emptied.
        """
        kind = self._kind(block)
        lanes = [{kind.input: x} for x in xs]
        xs.clear()
        return self._executor(block).forward(block, kind, lanes, loras)

    def forward_keeping(
        self, block: Block, x: mx.array, loras: Loras, input_too: bool
    ) -> tuple[mx.array, Values]:
        """A layer's output (1, rung, D), and what `backward` would otherwise recompute."""
        kind = self._kind(block)
        values: Values = {kind.input: x}
        del x
        y = self._executor(block).forward_keeping(block, kind, values, loras, input_too)
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
        """A layer's vjp at x (1, rung, D): dx, where wanted, and (dA, dB) per adapted linear.

        `kept` is what `forward_keeping` has returned; it is spent.
        """
        kind = self._kind(block)
        values: Values = {kind.input: x, f"~{kind.output}": dy}
        del x, dy
        if kept is not None:
            values.update(kept)
            kept.clear()
        executor = self._executor(block)
        gradients = executor.backward(block, kind, values, loras, input_too, kept is not None)
        return values.get(f"~{kind.input}"), gradients

    def hidden(self, x: mx.array, scored: slice) -> mx.array:
        """What the head multiplies at the positions `scored`, (N, D), of its input (1, rung, D)."""
        block = self.blocks[-1]
        kind = self._kind(block)
        (whole,) = self._executor(block).forward(block, kind, [{kind.input: x}], [{}])
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
        step = self._kind(self.blocks[-1]).steps[-1]
        matrix = self.bundle.manifest.matrices[step.matrix]
        with self.profile.span("head"):
            return self.head_kernel.run(hs, targets, matrix, gradient, predictions)

    def head_backward(self, x: mx.array, dh: mx.array, scored: slice) -> mx.array:
        """dx (1, rung, D) at the head's input x, from dh (N, D) at the positions `scored`."""
        block = self.blocks[-1]
        kind = self._kind(block)
        whole = mx.zeros((1, self.rung, dh.shape[-1]))
        whole[0, scored] = dh
        values: Values = {kind.input: x, f"~{kind.steps[-1].inputs[0]}": whole}
        del x, whole
        self._executor(block).backward(block, kind, values, {}, True)
        return values[f"~{kind.input}"]

    def release(self, block: Block) -> None:
        """Give the block's mapped pages back, and what was unpacked of it."""
        self.linear.release()
        self.weights.release(block)

    def read_ahead(self, block: Block) -> None:
        """Begin to bring the block's weights into the system's file cache."""
        self.weights.read_ahead(block)

    def _kind(self, block: Block) -> Kind:
        return self._folded[block.kind][0]

    def _executor(self, block: Block) -> Executor:
        return self._folded[block.kind][1]
