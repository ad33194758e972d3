"""Elementwise graphs: what a model computes between two products, and its vjp, as functions.

Both take only the inputs on which they depend, so that no value is kept for a backward pass that
does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from msgspec.structs import replace

from export.cut.properties import continues, gated_activation, treats_tokens_alike
from export.cut.trace import Function, Trace, trace
from runtime.core.errors import BundleError
from runtime.operations.elementwise import Elementwise
from runtime.operations.values import F32, Shape, T, shape_at

# a graph is tried for running by tiles of tokens where it allocates more than this many times the
# hidden state
TILING_PAYS = 0.5


Stage = Callable[[Mapping[str, mx.array], mx.array | None], list[mx.array]]
"""What a model computes, from arrays by name and, to decode, the position of the first token."""


@dataclass(frozen=True)
class TracedFunction:
    """A function of an elementwise operation and the shapes of its inputs, at any length.

    `positioned` says that a last input besides is the position of the first token.
    """

    call: Function
    shapes: tuple[Shape, ...]
    differentiated: bool = False
    positioned: bool = False

    def probes(self, tokens: int) -> list[mx.array]:
        """Zeros that it takes for so many tokens."""
        zeros = [mx.zeros(shape_at(shape, tokens)) for shape in self.shapes]
        return [*zeros, mx.array(0, mx.int32)] if self.positioned else zeros

    def trace(self, tokens: int) -> Trace:
        """Its trace for so many tokens."""
        return trace(self.call, self.probes(tokens), self.differentiated)


@dataclass(frozen=True)
class ElementwiseGraph:
    """An elementwise operation and its functions, by direction: "forward", "vjp", "decode"."""

    operation: Elementwise
    functions: dict[str, TracedFunction]


@dataclass(frozen=True)
class CutGraph:
    """An elementwise graph as `cut_graph` returns it.

    parameters: shapes of the small tensors that the graph takes, by name.  signature: equal for
    equal computations.
    """

    operation: Elementwise
    graph: ElementwiseGraph
    parameters: dict[str, tuple[int, ...]]
    signature: str


def cut_graph(
    name: str,
    sources: dict[str, Shape],
    parameters: dict[str, tuple[int, ...]],
    targets: list[str],
    values: dict[str, Shape],
    stage: Stage,
    tokens: int,
) -> CutGraph:
    """Make the elementwise graph that computes `targets`.

    Args:
        name: of the graph, as in the bundle.
        sources: shapes of the activations that it may read.
        parameters: shapes of the small tensors that it may read.
        targets: names of what it computes.
        values: shapes of all named values, the targets among them; "x" is the hidden state.
        stage: called with some of the inputs; missing arrays are zeros.
        tokens: the length to trace at. The functions hold at any length.

    Raises:
        BundleError: a token's results depend on other tokens.
    """
    shapes: dict[str, Shape] = {**sources, **{f"@{k}": v for k, v in parameters.items()}}

    def over(keys: Sequence[str]) -> Function:
        chosen = tuple(keys)
        return lambda *arrays: stage(dict(zip(chosen, arrays, strict=True)), None)

    def probe(keys: Sequence[str]) -> list[mx.array]:
        return [mx.zeros(shape_at(shapes[key], tokens)) for key in keys]

    everything = tuple(shapes)
    full = trace(over(everything), probe(everything))
    wanted = frozenset().union(*full.depends)
    inputs = tuple(key for position, key in enumerate(everything) if position in wanted)
    primals = tuple(key for key in inputs if not key.startswith("@"))
    constants = tuple(key for key in inputs if key.startswith("@"))
    inputs = primals + constants
    forward = over(inputs)

    def decode(*arrays: mx.array) -> list[mx.array]:
        return stage(dict(zip(inputs, arrays[:-1], strict=True)), arrays[-1])

    cotangents = tuple(f"~{target}" for target in targets)
    shapes.update({f"~{target}": values[target] for target in targets})
    vjp_candidates = (*primals, *constants, *cotangents)

    def pull(keys: tuple[str, ...]) -> Function:
        def pulled(*arrays: mx.array) -> list[mx.array]:
            given = dict(zip(keys, arrays, strict=True))
            bucket = next(a for k, a in given.items() if k.startswith("~")).shape
            length = bucket[list(shapes[next(k for k in keys if k.startswith("~"))]).index(T)]
            for key in vjp_candidates:
                if key not in given:  # the vjp does not depend on it
                    given[key] = mx.zeros(shape_at(shapes[key], length))
            rest = [given[key] for key in constants]
            _, gradients = mx.vjp(
                lambda *arrays: forward(*arrays, *rest),
                [given[key] for key in primals],
                [given[key] for key in cotangents],
            )
            return list(gradients)

        return pulled

    traced = trace(pull(vjp_candidates), probe(vjp_candidates), differentiated=True)
    used = frozenset().union(*traced.depends)
    vjp_inputs = tuple(
        key
        for position, key in enumerate(vjp_candidates)
        if position in used or key in cotangents[:1]
    )
    input_shapes = tuple(shapes[key] for key in inputs)
    functions = {
        "forward": TracedFunction(forward, input_shapes),
        "vjp": TracedFunction(
            pull(vjp_inputs), tuple(shapes[key] for key in vjp_inputs), differentiated=True
        ),
        "decode": TracedFunction(decode, input_shapes, positioned=True),
    }
    traces = {direction: one.trace(tokens) for direction, one in functions.items()}
    operation = Elementwise(
        inputs=inputs,
        outputs=tuple(targets),
        graph=name,
        vjp_inputs=vjp_inputs,
        vjp_outputs=primals,
        vjp_same=_same(traces["vjp"], vjp_inputs, primals),
        position=any(len(inputs) in depends for depends in traces["decode"].depends),
    )
    if not operation.position:  # its forward decodes too
        del functions["decode"], traces["decode"]
    if not continues(forward, decode, inputs, operation.outputs, {**values, **shapes}):
        raise BundleError(
            f"the model computes {', '.join(targets)} of one token from other tokens, which only "
            "attention may do; that is not supported"
        )
    most = max(traces[direction].workspace_bytes for direction in ("forward", "vjp"))
    if most > TILING_PAYS * tokens * math.prod(int(d) for d in values["x"] if d != T) * F32:
        known = {**values, **shapes}
        forward_alike = treats_tokens_alike(forward, inputs, operation.outputs, known)
        vjp_alike = treats_tokens_alike(pull(vjp_inputs), vjp_inputs, primals, known)
        operation = replace(operation, tokenwise=forward_alike and vjp_alike)
    if operation.may_be_gated(values):
        shape = shape_at(values[targets[0]], tokens)
        operation = replace(operation, gated=gated_activation(forward, pull(vjp_inputs), shape))
    return CutGraph(
        operation,
        ElementwiseGraph(operation, functions),
        {key[1:]: parameters[key[1:]] for key in constants},
        "|".join(part.signature for part in traces.values()),
    )


def _same(vjp: Trace, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """For each gradient the cotangent or earlier gradient that is the same array, or ""."""
    found = []
    for passed, first in zip(vjp.passes, vjp.same, strict=True):
        if passed is not None and inputs[passed].startswith("~"):
            found.append(inputs[passed])
        else:
            found.append("" if first is None else outputs[first])
    return tuple(found)
