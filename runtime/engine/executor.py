"""Running the steps of a block_type of block, forward and reversed, over a number of tokens.

Invariant: after each step its results are evaluated and whatever died with it is dropped, so that
what is alive is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ondevice.bundle.manifest import Block, BlockType, Step, shape_at
from ondevice.bundle.store import Bundle
from runtime.engine.graphs import GraphRunner
from runtime.engine.kernels.attention import AttentionKernel
from runtime.engine.kernels.in_place import put
from runtime.engine.kernels.linear import LinearKernel, Lora
from runtime.engine.profile import Profile
from runtime.lowering.schedule import Op, backward_schedule, forward_schedule, keeping_schedule, lse
from runtime.lowering.token_tiles import unfold
from runtime.storage.weights import Weights

Loras = dict[str, Lora]
Gradients = dict[str, tuple[mx.array, mx.array]]
Values = dict[str, mx.array]


def accumulate(total: Gradients, fresh: Gradients) -> None:
    """Add gradients to those that are there, in their place, evaluated; `fresh` is emptied."""
    while fresh:
        name, pair = fresh.popitem()
        if name in total:
            before = total.pop(name)
            pair = (before[0] + pair[0], before[1] + pair[1])
            del before  # so that nobody else holds what is given to the sum
            mx.eval(pair)
        total[name] = pair


@dataclass
class Executor:
    """Runs block_types over `tokens` tokens; `tile` runs what is inside their `tiled` steps."""

    bundle: Bundle
    weights: Weights
    tokens: int
    linear: LinearKernel
    attention: AttentionKernel
    graphs: GraphRunner
    profile: Profile
    tile: Executor | None = None
    _schedules: dict[tuple[Any, ...], tuple[Op, ...]] = field(default_factory=dict)

    def forward(
        self,
        block: Block,
        block_type: BlockType,
        lanes: list[Values],
        loras: Sequence[Loras],
        skip: int = 0,
    ) -> list[mx.array]:
        """The output of every lane, from values that hold the block_type's input."""
        key = ("forward", block_type.name)
        if key not in self._schedules:
            self._schedules[key] = forward_schedule(block_type)
        for op in self._schedules[key][skip:]:
            self._step_forward(block, block_type, op, lanes, loras, keep_lse=False)
        return [values[block_type.output] for values in lanes]

    def forward_keeping(
        self, block: Block, block_type: BlockType, values: Values, loras: Loras, input_too: bool
    ) -> mx.array:
        """The output; `values` is left with what `backward` would otherwise recompute."""
        key = ("keeping", block_type.name, frozenset(loras), input_too)
        if key not in self._schedules:
            self._schedules[key] = keeping_schedule(block_type, key[2], input_too)
        for op in self._schedules[key]:
            self._step_forward(block, block_type, op, [values], [loras], keep_lse=True)
        y = values.pop(block_type.output)
        values.pop(block_type.input, None)
        return y

    def backward(
        self,
        block: Block,
        block_type: BlockType,
        values: Values,
        loras: Loras,
        input_too: bool,
        kept: bool = False,
    ) -> Gradients:
        """Recompute and reverse; `values` is left with the input's gradient, where wanted."""
        gradients: Gradients = {}
        self._reverse(block, block_type, values, loras, input_too, kept, gradients)
        return gradients

    def _reverse(
        self,
        block: Block,
        block_type: BlockType,
        values: Values,
        loras: Loras,
        input_too: bool,
        kept: bool,
        gradients: Gradients,
    ) -> None:
        """Recompute and reverse, adding to the gradients."""
        key = ("backward", block_type.name, frozenset(loras), input_too, kept)
        if key not in self._schedules:
            self._schedules[key] = backward_schedule(block_type, key[2], input_too, kept)
        for op in self._schedules[key]:
            if op.backward:
                self._step_backward(block, block_type, op, values, loras, gradients)
            else:
                self._step_forward(block, block_type, op, [values], [loras], keep_lse=True)

    def _argument(self, block: Block, name: str, values: Values) -> mx.array:
        if name.startswith("@"):
            return self.weights.vector(block.tensor(name[1:]))
        return values[name]

    def _step_forward(
        self,
        block: Block,
        block_type: BlockType,
        op: Op,
        lanes: list[Values],
        loras: Sequence[Loras],
        keep_lse: bool,
    ) -> None:
        """One step for every lane; what dies with it is dropped lane by lane where it can be."""
        step = block_type.steps[op.step]
        with self.profile.span(f"{step.op} forward"):
            if step.op == "linear":
                self._linear_forward(block, step, op.wanted, lanes, loras)
            elif step.op == "tiled":
                self._tiled_forward(block, block_type, step, lanes, loras)
            for values in lanes:
                if step.op == "elementwise":
                    self._elementwise_forward(block, block_type, op, values)
                elif step.op == "attention":
                    self._attention_forward(step, values, keep_lse)
                for name in op.frees:
                    values.pop(name, None)

    def _elementwise_forward(
        self, block: Block, block_type: BlockType, op: Op, values: Values
    ) -> None:
        step = block_type.steps[op.step]
        arguments = [self._argument(block, name, values) for name in step.inputs]
        results = self.graphs.run(block_type, step, "forward", arguments, op.wanted, self.tokens)
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

    def _tiles(self) -> Iterator[tuple[Executor, slice]]:
        assert self.tile is not None  # only then are block_types folded
        for start in range(0, self.tokens, self.tile.tokens):
            yield self.tile, slice(start, start + self.tile.tokens)

    def _tiled_forward(
        self,
        block: Block,
        block_type: BlockType,
        step: Step,
        lanes: list[Values],
        loras: Sequence[Loras],
    ) -> None:
        inner = unfold(block_type, step)
        ys = [mx.zeros(shape_at(block_type.values[inner.output], self.tokens)) for _ in lanes]
        mx.eval(ys)
        for tile, tokens in self._tiles():
            inputs = [{inner.input: values[inner.input][:, tokens]} for values in lanes]
            parts = tile.forward(block, inner, inputs, loras)
            inputs.clear()
            for lane in range(len(lanes)):
                put(ys[lane], (slice(None), tokens), parts.pop(0))
        for values in lanes:
            values[inner.output] = ys.pop(0)

    def _tiled_backward(
        self,
        block: Block,
        block_type: BlockType,
        op: Op,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> Values:
        """Recompute and reverse a tile of tokens at a time."""
        inner = unfold(block_type, block_type.steps[op.step])
        x, dy = values[inner.input], values.pop(f"~{inner.output}")
        dx = mx.zeros(x.shape) if op.wanted else None
        for linear in (one for step in inner.steps for one in step.linears):
            if linear.name in loras:  # there before the tiles, not in the holes that they leave
                a, b = loras[linear.name].a, loras[linear.name].b
                gradients[linear.name] = (mx.zeros(a.shape), mx.zeros(b.shape))
        mx.eval(dx if dx is not None else [], gradients)
        for tile, tokens in self._tiles():
            part = {inner.input: x[:, tokens], f"~{inner.output}": dy[:, tokens]}
            tile._reverse(block, inner, part, loras, bool(op.wanted), False, gradients)
            if dx is not None:
                put(dx, (slice(None), tokens), part.pop(f"~{inner.input}"))
        return {} if dx is None else {inner.input: dx}

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
        block_type: BlockType,
        op: Op,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> None:
        step = block_type.steps[op.step]
        with self.profile.span(f"{step.op} backward"):
            found: Values = {}
            if step.op == "elementwise":
                found = self._elementwise_backward(block, block_type, op, values)
            elif step.op == "linear":
                found = self._linear_backward(block, op, step, values, loras, gradients)
            elif step.op == "attention":
                found = self._attention_backward(step, values)
            elif step.op == "tiled":
                found = self._tiled_backward(block, block_type, op, values, loras, gradients)
            for name, same in zip(op.wanted, op.same, strict=True):
                gradient = found.pop(name)
                before = values.pop(f"~{name}", None)
                if before is not None:
                    gradient = values[same] if same else before + gradient
                values[f"~{name}"] = gradient
                del gradient, before
            del found
            mx.eval([values[f"~{name}"] for name in op.wanted])
        for name in op.frees:
            values.pop(name, None)

    def _elementwise_backward(
        self, block: Block, block_type: BlockType, op: Op, values: Values
    ) -> Values:
        step = block_type.steps[op.step]
        for name in step.outputs:  # an output that nothing used has no gradient yet
            if f"~{name}" not in values:
                values[f"~{name}"] = mx.zeros(shape_at(block_type.values[name], self.tokens))
        arguments = [self._argument(block, name, values) for name in step.vjp_inputs]
        return self.graphs.run(block_type, step, "vjp", arguments, op.wanted, self.tokens)

    def _attention_backward(self, step: Step, values: Values) -> Values:
        q, k, v = (values[name] for name in step.inputs)
        out, sums = values[step.outputs[0]], values[lse(step)]
        d_out = values[f"~{step.outputs[0]}"]
        results = self.attention.backward(q, k, v, out, sums, d_out, step.scale, step.window)
        return dict(zip(step.inputs, results, strict=True))

    def _linear_backward(
        self,
        block: Block,
        op: Op,
        step: Step,
        values: Values,
        loras: Loras,
        gradients: Gradients,
    ) -> Values:
        source = step.inputs[0]
        total: mx.array | None = None
        for linear in step.linears:
            received = values.pop(f"~{linear.output}", None)
            if received is None:
                continue  # not adapted, and no adapter lies before it
            dy = received.squeeze(0)
            lora = loras.get(linear.name)
            if lora is not None:
                dy_b = self.linear.through_b(dy, lora)
                pair = self.linear.backward_lora(values[source].squeeze(0), dy, lora, dy_b)
                mx.eval(pair)
                accumulate(gradients, {linear.name: pair})
                del pair
            if op.wanted:
                matrix = self.bundle.manifest.matrices[block.tensor(linear.name)]
                dx = self.linear.backward_input(dy, matrix)
                if lora is not None:
                    dx = self.linear.add_lora_input(dx, lora, dy_b)
                    del dy_b
                total = dx if total is None else total + dx
                mx.eval(total)
                del dx
            del dy, received
        return {} if total is None else {source: total[None]}


__all__ = ["Executor", "Gradients", "Loras", "Values", "accumulate"]
