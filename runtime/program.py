"""Running a block's program forward and reversed, at one rung.

Invariant: after each step its results are evaluated and whatever died with it is dropped, so that
what is alive is what the schedule says. Blocks are the only interface that methods see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ondevice.bundle import Bundle
from ondevice.manifest import Block, Kind, Step, at_rung
from runtime.glue import GlueKernel
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.head import HeadKernel, HeadResult, Targets
from runtime.kernels.linear import LinearKernel, Lora
from runtime.kernels.unpack import dense
from runtime.profile import Profile
from runtime.schedule import Op, backward_schedule, forward_schedule, keeping_schedule, lse
from runtime.weights import Weights

Loras = dict[str, Lora]
Gradients = dict[str, tuple[mx.array, mx.array]]
Values = dict[str, mx.array]


@dataclass
class Program:
    """The blocks of a bundle at one rung, ready to run."""

    bundle: Bundle
    weights: Weights
    rung: int
    linear: LinearKernel
    attention: AttentionKernel
    head_kernel: HeadKernel
    profile: Profile = field(default_factory=Profile)
    _glue: GlueKernel = field(init=False)
    _schedules: dict[tuple[Any, ...], tuple[Op, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._glue = GlueKernel(self.bundle, self.rung)

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
        return self._run_forward(block, kind, lanes, [{}], skip=1)[0]

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
        return self._run_forward(block, kind, lanes, loras)

    def forward_keeping(
        self, block: Block, x: mx.array, loras: Loras, input_too: bool
    ) -> tuple[mx.array, Values]:
        """A layer's output (1, rung, D), and what `backward` would otherwise recompute."""
        kind = self._kind(block)
        values: Values = {kind.input: x}
        del x
        key = ("keeping", kind.name, frozenset(loras), input_too)
        if key not in self._schedules:
            self._schedules[key] = keeping_schedule(kind, key[2], input_too)
        for op in self._schedules[key]:
            self._step_forward(block, kind.steps[op.step], op, [values], [loras], keep_lse=True)
        y = values.pop(kind.output)
        values.pop(kind.input, None)
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
        gradients = self._run_backward(block, kind, values, loras, input_too, kept is not None)
        return values.get(f"~{kind.input}"), gradients

    def hidden(self, x: mx.array, scored: slice) -> mx.array:
        """What the head multiplies at the positions `scored`, (N, D), of its input (1, rung, D)."""
        block = self.blocks[-1]
        kind = self._kind(block)
        (whole,) = self._run_forward(block, kind, [{kind.input: x}], [{}])
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
        self._run_backward(block, kind, values, {}, True)
        return values[f"~{kind.input}"]

    def release(self, block: Block) -> None:
        """Give the block's mapped pages back, and what was unpacked of it."""
        self.linear.release()
        self.weights.release(block)

    def read_ahead(self, block: Block) -> None:
        """Begin to bring the block's weights into the system's file cache."""
        self.weights.read_ahead(block)

    def _kind(self, block: Block) -> Kind:
        return self.bundle.manifest.kinds[block.kind]

    def _run_forward(
        self,
        block: Block,
        kind: Kind,
        lanes: list[Values],
        loras: Sequence[Loras],
        skip: int = 0,
    ) -> list[mx.array]:
        key = ("forward", kind.name)
        if key not in self._schedules:
            self._schedules[key] = forward_schedule(kind)
        for op in self._schedules[key][skip:]:
            self._step_forward(block, kind.steps[op.step], op, lanes, loras, keep_lse=False)
        return [values[kind.output] for values in lanes]

    def _run_backward(
        self,
        block: Block,
        kind: Kind,
        values: Values,
        loras: Loras,
        input_too: bool,
        kept: bool = False,
    ) -> Gradients:
        """Recompute and reverse; `values` is left with the input's gradient, where wanted."""
        key = ("backward", kind.name, frozenset(loras), input_too, kept)
        if key not in self._schedules:
            self._schedules[key] = backward_schedule(kind, key[2], input_too, kept)
        gradients: Gradients = {}
        for op in self._schedules[key]:
            step = kind.steps[op.step]
            if op.backward:
                with self.profile.span(f"{step.op} backward"):
                    self._step_backward(block, step, op.wanted, values, loras, gradients)
                for name in op.frees:
                    values.pop(name, None)
            else:
                self._step_forward(block, step, op, [values], [loras], keep_lse=True)
        return gradients

    def _argument(self, block: Block, name: str, values: Values) -> mx.array:
        if name.startswith("@"):
            return self.weights.vector(block.tensor(name[1:]))
        return values[name]

    def _step_forward(
        self,
        block: Block,
        step: Step,
        op: Op,
        lanes: list[Values],
        loras: Sequence[Loras],
        keep_lse: bool,
    ) -> None:
        """One step for every lane; what dies with it is dropped lane by lane where it can be."""
        with self.profile.span(f"{step.op} forward"):
            if step.op == "linear":
                self._linear_forward(block, step, op.wanted, lanes, loras)
            for values in lanes:
                if step.op == "glue":
                    self._glue_forward(block, step, values)
                elif step.op == "attention":
                    self._attention_forward(step, values, keep_lse)
                for name in op.frees:
                    values.pop(name, None)

    def _glue_forward(self, block: Block, step: Step, values: Values) -> None:
        arguments = [self._argument(block, name, values) for name in step.inputs]
        results = self._glue.run(self._kind(block), step, "forward", arguments, step.outputs)
        del arguments
        mx.eval(results)
        values.update(results)

    def _attention_forward(self, step: Step, values: Values, keep_lse: bool) -> None:
        q, k, v = (values[name] for name in step.inputs)
        out, sums = self.attention.forward(q, k, v, step.scale, step.window)
        mx.eval(out, sums)
        values[step.outputs[0]] = out
        if keep_lse:
            values[lse(step)] = sums

    def _linear_forward(
        self,
        block: Block,
        step: Step,
        wanted: tuple[str, ...],
        lanes: list[Values],
        loras: Sequence[Loras],
    ) -> None:
        xs = [values[step.inputs[0]].squeeze(0) for values in lanes]  # a view; [0] copies
        for linear in step.linears:
            if linear.output not in wanted:
                continue
            name = block.tensor(linear.name)
            bias = self.weights.vector(f"{name}.bias") if linear.bias else None
            matrix = self.bundle.manifest.matrices[name]
            adapters = [lora.get(linear.name) for lora in loras]
            ys = self.linear.forward_lanes(xs, matrix, bias, adapters)
            for values, y in zip(lanes, ys, strict=True):
                values[linear.output] = y[None]
            del ys

    def _step_backward(
        self,
        block: Block,
        step: Step,
        wanted: tuple[str, ...],
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> None:
        found: Values = {}
        if step.op == "glue":
            for name in step.outputs:  # an output that nothing used has no gradient yet
                if f"~{name}" not in values:
                    values[f"~{name}"] = mx.zeros(self._shape(block, name))
            arguments = [self._argument(block, name, values) for name in step.vjp_inputs]
            found = self._glue.run(self._kind(block), step, "vjp", arguments, wanted)
            del arguments
        elif step.op == "linear":
            self._linear_backward(block, step, bool(wanted), values, loras, gradients, found)
        elif step.op == "attention":
            q, k, v = (values[name] for name in step.inputs)
            out, sums = values[step.outputs[0]], values[lse(step)]
            d_out = values[f"~{step.outputs[0]}"]
            results = self.attention.backward(q, k, v, out, sums, d_out, step.scale, step.window)
            found = dict(zip(step.inputs, results, strict=True))
            del results
        for name in wanted:
            gradient = found.pop(name)
            before = values.pop(f"~{name}", None)
            values[f"~{name}"] = gradient if before is None else before + gradient
        del found
        mx.eval([values[f"~{name}"] for name in wanted])

    def _shape(self, block: Block, name: str) -> tuple[int, ...]:
        return at_rung(self._kind(block).values[name], self.rung)

    def _linear_backward(
        self,
        block: Block,
        step: Step,
        input_too: bool,
        values: Values,
        loras: Loras,
        gradients: Gradients,
        found: Values,
    ) -> None:
        source = step.inputs[0]
        total: mx.array | None = None
        for linear in step.linears:
            received = values.pop(f"~{linear.output}", None)
            if received is None:
                continue  # not adapted, and no adapter lies before it
            dy = received.squeeze(0)
            lora = loras.get(linear.name)
            if lora is not None:
                pair = self.linear.backward_lora(values[source].squeeze(0), dy, lora)
                mx.eval(pair)
                gradients[linear.name] = pair
            if input_too:
                matrix = self.bundle.manifest.matrices[block.tensor(linear.name)]
                dx = self.linear.backward_input(dy, matrix, lora)
                total = dx if total is None else total + dx
                mx.eval(total)
        if total is not None:
            found[source] = total[None]


__all__ = ["Gradients", "Loras", "Program", "Values"]
