"""Elementwise graphs: a model's computation between two products, and its vjp, as functions.

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
from runtime.arrays.arrays import DTYPES
from runtime.core.errors import BundleError
from runtime.operations.elementwise import Elementwise
from runtime.operations.values import F32, Shape, T, gradient_of, is_parameter, shape_at, token_axis

# a graph is tried for running by tiles of tokens where it allocates more than this many times the
# hidden state
TILING_PAYS = 0.5


Stage = Callable[[Mapping[str, mx.array], mx.array | None], list[mx.array]]
"""A computation of the model from arrays by name and, to decode, the first token's position."""


@dataclass(frozen=True)
class TracedFunction:
    """A function of an elementwise operation and the shapes of its inputs, at any length.

    positioned: whether it has a further, last input, the position of the first token.
    """

    call: Function
    shapes: tuple[Shape, ...]
    differentiated: bool = False
    positioned: bool = False

    def probes(self, tokens: int, dtype: str = "float32") -> list[mx.array]:
        """Zeros as its inputs, for so many tokens; values are of a type, parameters float32."""
        zeros = [
            mx.zeros(shape_at(shape, tokens), DTYPES[dtype if T in shape else "float32"])
            for shape in self.shapes
        ]
        return [*zeros, mx.array(0, mx.int32)] if self.positioned else zeros

    def trace(self, tokens: int, dtype: str = "float32") -> Trace:
        """Its trace for so many tokens, with values of a type."""
        return trace(self.call, self.probes(tokens, dtype), self.differentiated)


@dataclass(frozen=True)
class ElementwiseGraph:
    """An elementwise operation and its functions, by direction: "forward", "vjp", "decode".

    parameters: shapes of the small tensors that it takes, by name.
    """

    operation: Elementwise
    functions: dict[str, TracedFunction]
    parameters: dict[str, tuple[int, ...]]


def cut_graph(
    name: str,
    sources: dict[str, Shape],
    parameters: dict[str, tuple[int, ...]],
    targets: list[str],
    values: dict[str, Shape],
    stage: Stage,
    tokens: int,
) -> ElementwiseGraph:
    """Make the elementwise graph that computes `targets`.

    Args:
        name: of the graph, as in the bundle.
        sources: shapes of the activations that it may read.
        parameters: shapes of the small tensors that it may read.
        targets: names of the values that it computes.
        values: shapes of all named values, the targets among them; "x" is the hidden state.
        stage: called with some of the inputs; missing arrays are zeros.
        tokens: the length to trace at. The functions work at any length.

    Raises:
        BundleError: a token's results depend on other tokens.
    """
    shapes: dict[str, Shape] = {
        **values,
        **sources,
        **{_parameter(key): shape for key, shape in parameters.items()},
        **{gradient_of(target): values[target] for target in targets},
    }
    readable = (*sources, *map(_parameter, parameters))
    read = _inputs_read(_forward(stage, readable), readable, shapes, tokens)
    primals = tuple(key for key in read if not is_parameter(key))
    constants = tuple(key for key in read if is_parameter(key))
    inputs = primals + constants
    forward, decode = _forward(stage, inputs), _forward(stage, inputs, placed=True)
    keys = (primals, constants, tuple(map(gradient_of, targets)))
    pullback = _Pullback(forward, *keys, shapes)
    vjp_inputs = pullback.inputs_read(tokens)
    vjp = pullback.function(vjp_inputs)

    input_shapes = tuple(shapes[key] for key in inputs)
    vjp_shapes = tuple(shapes[key] for key in vjp_inputs)
    functions = {
        "forward": TracedFunction(forward, input_shapes),
        "vjp": TracedFunction(vjp, vjp_shapes, differentiated=True),
        "decode": TracedFunction(decode, input_shapes, positioned=True),
    }
    placed = {
        "forward": TracedFunction(decode, input_shapes, positioned=True),
        "vjp": TracedFunction(
            _Pullback(decode, *keys, shapes).function(vjp_inputs, placed=True),
            vjp_shapes,
            differentiated=True,
            positioned=True,
        ),
    }
    traces = {direction: function.trace(tokens) for direction, function in functions.items()}
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

    if not continues(forward, decode, inputs, operation.outputs, shapes):
        raise BundleError(
            f"the model computes {', '.join(targets)} of one token from other tokens, which only "
            "attention may do; that is not supported"
        )
    operation = _with_properties(operation, functions, placed, traces, values, shapes, tokens)
    if operation.placed:
        functions |= placed
    return ElementwiseGraph(
        operation,
        functions,
        {key[1:]: parameters[key[1:]] for key in constants},
    )


def _parameter(name: str) -> str:
    """The name of a small tensor among a graph's inputs."""
    return f"@{name}"


def _is_cotangent(key: str) -> bool:
    return key.startswith("~")


def _forward(stage: Stage, keys: Sequence[str], placed: bool = False) -> Function:
    """The stage as a function of these inputs, with results of the first one's type.

    `placed`: and of the position of the first token.
    """

    def forward(*arrays: mx.array) -> list[mx.array]:
        given, position = (arrays[:-1], arrays[-1]) if placed else (arrays, None)
        results = stage(dict(zip(keys, given, strict=True)), position)
        return [result.astype(arrays[0].dtype) for result in results]

    return forward


def _inputs_read(
    function: Function,
    keys: Sequence[str],
    shapes: Mapping[str, Shape],
    tokens: int,
    differentiated: bool = False,
) -> tuple[str, ...]:
    """The inputs on which the results of a function of `keys` depend, in their order."""
    probes = [mx.zeros(shape_at(shapes[key], tokens)) for key in keys]
    positions = frozenset().union(*trace(function, probes, differentiated).depends)
    return tuple(key for position, key in enumerate(keys) if position in positions)


@dataclass(frozen=True)
class _Pullback:
    """The vjp of a graph's forward function with respect to its primals."""

    forward: Function
    primals: tuple[str, ...]
    constants: tuple[str, ...]
    cotangents: tuple[str, ...]
    shapes: Mapping[str, Shape]

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs that the gradients may depend on."""
        return (*self.primals, *self.constants, *self.cotangents)

    def inputs_read(self, tokens: int) -> tuple[str, ...]:
        """The inputs on which the gradients depend, and a cotangent, which tells the length."""
        function = self.function(self.inputs)
        read = _inputs_read(function, self.inputs, self.shapes, tokens, differentiated=True)
        return tuple(key for key in self.inputs if key in read or key == self.cotangents[0])

    def function(self, keys: Sequence[str], placed: bool = False) -> Function:
        """The gradients as a function of `keys`; other inputs do not matter and are zeros.

        `placed`: and of the position of the first token, the last input of the forward.
        """

        def pulled(*arrays: mx.array) -> list[mx.array]:
            values, position = (arrays[:-1], arrays[-1:]) if placed else (arrays, ())
            given = dict(zip(keys, values, strict=True))
            cotangent = next(key for key in given if _is_cotangent(key))
            tokens = given[cotangent].shape[token_axis(self.shapes[cotangent])]
            for key in self.inputs:
                if key not in given:
                    dtype = mx.float32 if is_parameter(key) else given[cotangent].dtype
                    given[key] = mx.zeros(shape_at(self.shapes[key], tokens), dtype)
            constants = [given[key] for key in self.constants]
            _, gradients = mx.vjp(
                lambda *primals: self.forward(*primals, *constants, *position),
                [given[key] for key in self.primals],
                [given[key] for key in self.cotangents],
            )
            return list(gradients)

        return pulled


def _with_properties(
    operation: Elementwise,
    functions: Mapping[str, TracedFunction],
    placed: Mapping[str, TracedFunction],
    traces: Mapping[str, Trace],
    values: Mapping[str, Shape],
    shapes: dict[str, Shape],
    tokens: int,
) -> Elementwise:
    """The operation with the properties that let it run by tiles, or as a gated activation.

    `placed` has its functions that take the position of the first token.
    """
    forward, vjp = functions["forward"].call, functions["vjp"].call
    if _tiling_pays(traces, values["x"], tokens):
        reversed_names = operation.vjp_inputs, operation.vjp_outputs
        if operation.position:  # its forward continues at a position, or it would be refused
            tokenwise = continues(vjp, placed["vjp"].call, *reversed_names, shapes)
        else:
            own = operation.inputs, operation.outputs
            tokenwise = treats_tokens_alike(forward, *own, shapes)
            tokenwise = tokenwise and treats_tokens_alike(vjp, *reversed_names, shapes)
        operation = replace(operation, tokenwise=tokenwise)
    if operation.may_be_gated(values):
        names = (*operation.inputs, *operation.outputs)
        taken = [shape_at(shapes[name], tokens) for name in names]
        parameters = len(operation.inputs) - len(operation.activations)
        if all(math.prod(shapes[name]) == 1 for name in operation.inputs if is_parameter(name)):
            gated = gated_activation(forward, vjp, *taken, parameters=parameters)
            operation = replace(operation, gated=gated)
    return operation


def _tiling_pays(traces: Mapping[str, Trace], hidden: Shape, tokens: int) -> bool:
    """Whether a graph allocates so much that running it by tiles of tokens is worth a trial."""
    most = max(traces[direction].workspace_bytes for direction in ("forward", "vjp"))
    width = math.prod(int(size) for size in hidden if size != T)
    return most > TILING_PAYS * tokens * width * F32


def _same(vjp: Trace, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """For each gradient the cotangent or earlier gradient that is the same array, or ""."""
    names = []
    for passed, first in zip(vjp.passes, vjp.same, strict=True):
        if passed is not None and _is_cotangent(inputs[passed]):
            names.append(inputs[passed])
        else:
            names.append("" if first is None else outputs[first])
    return tuple(names)
