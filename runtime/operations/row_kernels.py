"""Kernels for a few tokens that are decoded, whose values are NumPy's arrays, on a CPU.

They take the places of others in `kernel_table` where weights are multiplied where they lie. To
wait for MLX some 70 times takes longer than all else that a token needs. Other kernels are given
MLX's arrays and return them; here `np.asarray` takes either.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.arrays.values import Loras, Values
from runtime.operations.attention import CachedAttention
from runtime.operations.base import Operation
from runtime.operations.cached_attention_kernel import hidden, ring_positions
from runtime.operations.elementwise import Elementwise, Placed
from runtime.operations.gated import Gated
from runtime.operations.gated_kernel import curve_of, gate_into, parts_of
from runtime.operations.kernel import Kernel, Run, Tools
from runtime.operations.linear import Linear
from runtime.operations.values import POSITION, graph_key, is_parameter


@dataclass(frozen=True)
class RowKernel(Kernel):
    """Runs an operation lane by lane."""

    def argument(self, run: Run, name: str, values: Any, loras: Loras) -> Any:
        """A value, or a small tensor that is read as `@name`, which stays in memory."""
        if not is_parameter(name):
            return np.asarray(values[name])
        tensor = run.block.tensor(name[1:])
        assert self.tools.matrices.in_place is not None
        vectors = self.tools.matrices.in_place.vectors
        if tensor not in vectors:
            vectors[tensor] = np.asarray(self.tools.vector(tensor, loras))
        return vectors[tensor]

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        for values, own in zip(lanes, loras, strict=True):
            self.row(run, values, own)

    @abstractmethod
    def row(self, run: Run, values: Any, loras: Loras) -> None:
        """Add the operation's results to the values of a lane."""


class RowLinear(RowKernel):
    """`Linear`, all its products at once; see `linear_kernel`."""

    def row(self, run: Run, values: Any, loras: Loras) -> None:
        operation, tools = run.operation(Linear), self.tools
        x = np.asarray(values[operation.inputs[0]])[0]
        linears = [
            linear for linear in operation.linears if linear.output in run.instruction.wanted
        ]
        matrices = [tools.stored[run.block.tensor(linear.name)] for linear in linears]
        ys = tools.matrices.of_rows(x, matrices)
        for linear, y in zip(linears, ys, strict=True):
            if linear.bias:
                y += self.argument(run, f"@{linear.name}.bias", values, loras)
            if (lora := loras.get(linear.name)) is not None:
                through_a = np.einsum("tc,cr->tr", x, np.asarray(lora.a))  # no threads that spin
                y += np.einsum("tr,rc->tc", through_a * np.float32(lora.scale), np.asarray(lora.b))
            values[linear.output] = y[None]


class RowGraph(RowKernel):
    """`Elementwise` and `Placed`: the graph, replayed by NumPy if it has all the primitives."""

    def row(self, run: Run, values: Any, loras: Loras) -> None:
        operation, tools = run.instruction.operation, self.tools
        given = [self.argument(run, name, values, loras) for name in operation.inputs_read]
        if isinstance(operation, Placed):
            key, given = operation.key(run.tokens), [*given, np.asarray(values[POSITION])]
        else:
            key = graph_key(operation.graph, "forward", run.tokens)
        results = tools.graphs.replay(key, given)
        values.update(zip(operation.results, results, strict=True))


class RowGated(RowKernel):
    """`Gated`."""

    def row(self, run: Run, values: Any, loras: Loras) -> None:
        operation = run.operation(Gated)
        (name,) = operation.outputs
        width = int(run.program.values[name][-1])
        y: Any = np.empty((1, run.tokens, width), np.float32)
        parts = parts_of([values[each] for each in operation.activations], width)
        gate_into(
            curve_of(operation, lambda each: self.argument(run, each, values, loras)), parts, y
        )
        values[name] = y


class RowAttention(RowKernel):
    """`CachedAttention` of one token; see `prefix_kernel` for prefixes and sinks."""

    def row(self, run: Run, values: Any, loras: Loras) -> None:
        operation = run.operation(CachedAttention)
        q, k, v = (np.asarray(values[name])[0, :, 0] for name in operation.inputs)  # (H, D), (K, ·)
        keys, past = (np.asarray(values[name])[0] for name in operation.cache)  # (K, S, ·)
        position, slots = int(values[POSITION]), keys.shape[1]
        if not operation.cache_of:
            keys[:, position % slots], past[:, position % slots] = k, v
        places = ring_positions(slots, position + 1)
        parts = [[ring[:, : len(places)] for ring in (keys, past)]]
        if (prefix := loras.get(operation.prefix)) is not None:
            trained = (np.asarray(half) for half in (prefix.a, prefix.b))  # (m, K ·)
            parts.append([half.reshape(len(half), len(k), -1).swapaxes(0, 1) for half in trained])
        rows = q.reshape(len(k), -1, q.shape[1]) * np.float32(operation.scale)
        scores = [np.einsum("krd,knd->krn", rows, part) for part, _ in parts]
        if operation.cap is not None:
            cap = np.float32(operation.cap)
            scores = [np.tanh(score / cap) * cap for score in scores]
        scores[0][..., hidden(places, position, operation.window)] = -np.inf
        tops = [score.max(axis=-1, keepdims=True) for score in scores]
        if operation.sinks:
            sinks = self.argument(run, operation.sinks, values, loras)
            tops.append(sinks.reshape(len(k), -1, 1))
        top = np.maximum.reduce(tops)
        weights = [np.exp(score - top) for score in scores]
        total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
        if operation.sinks:
            total += np.exp(tops[-1] - top)
        out = sum(
            np.einsum("krn,kne->kre", w, part) for w, (_, part) in zip(weights, parts, strict=True)
        )
        values[operation.outputs[0]] = (out / total).reshape(1, len(q), 1, -1)


ROW_KERNELS: dict[type[Operation], Callable[[Tools], Kernel]] = {
    Linear: RowLinear,
    Elementwise: RowGraph,
    Placed: RowGraph,
    Gated: RowGated,
}
ONE_ROW_KERNELS = ROW_KERNELS | {CachedAttention: RowAttention}
