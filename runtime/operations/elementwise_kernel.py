"""The elementwise kernel: serialized graphs between matrix products, forward and vjp.

A graph whose tokens do not depend on each other runs a tile of them at a time, so that its
intermediates are small: they stay in the processor's cache, and add hardly anything to the peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.elementwise import Elementwise, Placed
from runtime.operations.kernel import Kernel, Run
from runtime.operations.program import Program
from runtime.operations.values import (
    POSITION,
    gradient_of,
    graph_key,
    is_parameter,
    shape_at,
    token_axis,
)


class ElementwiseKernel(Kernel):
    """Runs the graphs of `Elementwise` operations."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Elementwise)
        for values, lora in zip(lanes, loras, strict=True):
            arguments = [self.tools.argument(run.block, n, values, lora) for n in operation.inputs]
            results = self.results(
                operation, run.program, "forward", arguments, run.instruction.wanted, run.tokens
            )
            values.update(results)

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation = run.operation(Elementwise)
        for name in operation.outputs:  # an output that nothing used has no gradient yet
            if gradient_of(name) not in values:
                shape = shape_at(run.program.values[name], run.tokens)
                values[gradient_of(name)] = mx.zeros(shape, self.tools.dtype)
        read = operation.vjp_inputs
        arguments = [self.tools.argument(run.block, name, values, loras) for name in read]
        wanted = run.instruction.wanted
        return self.results(operation, run.program, "vjp", arguments, wanted, run.tokens)

    def results(
        self,
        operation: Elementwise,
        program: Program,
        direction: str,
        arguments: Sequence[mx.array],
        wanted: Sequence[str],
        tokens: int,
    ) -> Values:
        """The results named `wanted` of "forward" or "vjp", evaluated.

        `tokens` is how many the arguments have: the bucket's, or those of a tile of them.
        """
        forward = direction == "forward"
        names = operation.inputs if forward else operation.vjp_inputs
        made = operation.outputs if forward else operation.vjp_outputs
        execution = self.tools.execution
        graph_tokens = operation.graph_tokens(execution.bucket, execution.one_evaluation)
        key = graph_key(operation.graph, direction, graph_tokens, execution.value_dtype)
        if graph_tokens == tokens:
            whole = self.tools.graphs.call(key, [*arguments, *_position(operation, 0)])
            results = dict(zip(made, whole, strict=True))
            del whole
            results = {name: results[name] for name in wanted}
            working_bytes = self.tools.graphs.workspace_bytes(key)
            self.tools.arrays.evaluate([*results.values()], working_bytes)
            # queries, keys and values may be parts of one matrix's product
            return {
                name: self.tools.arrays.apart(result, arguments) for name, result in results.items()
            }
        given, graphs = dict(zip(names, arguments, strict=True)), self.tools.graphs
        same = {} if forward else dict(zip(made, operation.vjp_same, strict=True))
        holder = {name: same.get(name) or name for name in wanted}
        own = dict.fromkeys(
            array_name for array_name in holder.values() if not array_name.startswith("~")
        )
        shapes = {name: shape_at(program.values[name], tokens) for name in own}
        wholes = {name: mx.zeros(shape, self.tools.dtype) for name, shape in shapes.items()}
        self.tools.arrays.settle(wholes)
        for start in range(0, tokens, graph_tokens):
            tile = slice(start, start + graph_tokens)
            sliced = [
                array if is_parameter(name) else array[_along(program, name, tile)]
                for name, array in given.items()
            ]
            sliced += _position(operation, start)
            results = dict(zip(made, graphs.call(key, sliced), strict=True))
            del sliced
            computed, working_bytes = [results[name] for name in own], graphs.workspace_bytes(key)
            self.tools.arrays.evaluate(computed, working_bytes, within_plan=True)
            computed.clear()
            for name in own:
                self.tools.arrays.put(wholes[name], _along(program, name, tile), results[name])
            del results
        return {
            name: wholes[array_name] if array_name in own else given[array_name]
            for name, array_name in holder.items()
        }


def _position(operation: Elementwise, start: int) -> list[mx.array]:
    """The position of the first token, where the operation's graphs take it."""
    return [mx.array(start, mx.int32)] if operation.placed else []


def _along(program: Program, name: str, tile: slice) -> tuple[slice, ...]:
    axis = token_axis(program.values[name.removeprefix("~")])
    return (*(slice(None),) * axis, tile)


class PlacedKernel(Kernel):
    """Runs the graph of a `Placed` operation at the position in the value `POSITION`."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Placed)
        for values, lora in zip(lanes, loras, strict=True):
            arguments = [self.tools.argument(run.block, n, values, lora) for n in operation.inputs]
            key = operation.key(run.tokens)
            results = self.tools.graphs.call(key, [*arguments, values[POSITION]])
            del arguments
            made = dict(zip(operation.outputs, results, strict=True))
            del results
            wanted = {name: made[name] for name in run.instruction.wanted}
            del made
            working_bytes = self.tools.graphs.workspace_bytes(key)
            self.tools.arrays.evaluate([*wanted.values()], working_bytes)
            values.update(wanted)
