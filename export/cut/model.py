"""Cutting an mlx-lm model into blocks of matrix products, attention and elementwise graphs.

The model runs over taps (see `export.cut.taps`), which record its matrix products and attention in
order, with their inputs. The computations between these are traced and become elementwise
graphs. Nothing here is specific to an architecture. A model that a program cannot express is
refused: if it has a matrix outside linear layers, an operation between two layers, or a mask that
is neither causal nor a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from msgspec.structs import replace

from export.cut.graphs import CutGraph, ElementwiseGraph, cut_graph
from export.cut.tape import (
    AttentionCall,
    Call,
    ConvolutionCall,
    DeltaCall,
    EmbeddingCall,
    ExpertsCall,
    LayerCall,
    LinearCall,
    PartCall,
    Tape,
)
from export.cut.taps import LayerTap, Position, Taps, attention_windows, probe_length
from export.cut.trace import trace
from export.sources.families import build_model
from runtime.arrays.stored import Block
from runtime.core.errors import BundleError
from runtime.operations.attention import Attention
from runtime.operations.convolution import Convolution
from runtime.operations.elementwise import Elementwise
from runtime.operations.embedding import Embedding, Lookup
from runtime.operations.experts import Experts
from runtime.operations.gated_delta import GatedDelta
from runtime.operations.head import Head
from runtime.operations.linear import Linear, Product
from runtime.operations.program import BlockType, StoredOperation
from runtime.operations.values import Shape, T, is_parameter, shape_at, token_axis

_NUMBERS = "numbers"  # the value with those of the tokens, (1, T, 1)
_HUGE = 1e9  # a product that any cap of logits cuts off


@dataclass
class Cut:
    """A model as blocks in order, the types they share, and the graphs of all types."""

    block_types: dict[str, BlockType] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    graphs: list[ElementwiseGraph] = field(default_factory=list)


def cut_model(family: str, config: dict[str, Any]) -> Cut:
    """Cut the model of `mlx_lm.models.<family>` into programs.

    Args:
        family: mlx-lm's module name.
        config: the argument of its `ModelArgs.from_dict`.

    Raises:
        BundleError: the model does something that a program cannot express.
    """
    try:
        return _cut_model(family, config)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as problem:
        raise BundleError(f"{family} cannot be run with this configuration: {problem}") from problem


def _cut_model(family: str, config: dict[str, Any]) -> Cut:
    model = build_model(family, config)
    taps = Taps(model, probe_length(model, config), config)
    cut = Cut()
    ends = _EndsCutter(taps)
    for block_type, graphs in (ends.embedding(), ends.head()):
        cut.block_types[block_type.name] = block_type
        cut.blocks.append(Block("", block_type.name))
        cut.graphs += graphs
    windows = attention_windows(taps, config)
    types: dict[str, str] = {}  # the names of layers' block types, by signature
    layers: list[Block] = []
    for index, layer in enumerate(taps.layers):
        name, hidden = f"layer{len(types)}", _columns(ends.calls[index + 1].inputs[0])
        block_type, graphs, signature = _LayerCutter(
            taps, layer, windows[index], name, hidden
        ).cut()
        if signature not in types:
            types[signature] = name
            cut.block_types[name] = block_type
            cut.graphs += graphs
        layers.append(Block(f"{taps.path}.{index}", types[signature]))
    cut.blocks[1:1] = layers
    return cut


class _EndsCutter:
    """Cuts the two ends of a model: before the first layer, the embedding, and after the last.

    Raises:
        BundleError: the model is not an embedding, layers one after another, and a head.
    """

    def __init__(self, taps: Taps) -> None:
        self.taps = taps
        with taps.recording(Tape()) as tape:
            try:
                taps.model(mx.zeros((1, taps.probe), dtype=mx.int32))
            except (TypeError, ValueError) as e:  # of a layer that returns more, too
                if further := next((tap for tap in taps.layers if tap.further), None):
                    raise further.problem(", ".join(further.further)) from e
                raise
        self.calls = tape.calls
        self.bias = False  # of the head
        self._check_calls()
        self.parameters = _parameters(taps.model)
        self.factor = 1.0  # of the logits, which the head's graph gives its hidden states
        self.cap: float | None = None  # of the logits after that
        self.passes = self._checked_passes()

    def embedding(self) -> tuple[BlockType, list[ElementwiseGraph]]:
        """The block type of the embedding, and its graphs."""
        block_type, graphs = self._elementwise("embed", "e", "x", 1)
        lookup = Embedding(("e",), self.calls[0].name, *(self.taps.positions or ()))
        if _NUMBERS in block_type.values:
            lookup = replace(lookup, numbers=_NUMBERS)
        return replace(block_type, input="", operations=(lookup, *block_type.operations)), graphs

    def head(self) -> tuple[BlockType, list[ElementwiseGraph]]:
        """The block type of the head, and its graphs."""
        block_type, graphs = self._elementwise("head", "x", "h", len(self.calls) - 1)
        head = Head((block_type.output,), self.calls[-1].name, self.bias, self.cap)
        return replace(block_type, operations=(*block_type.operations, head)), graphs

    def _check_calls(self) -> None:
        layers = [LayerCall] * len(self.taps.layers)
        if [type(call) for call in self.calls] != [EmbeddingCall, *layers, LinearCall]:
            raise BundleError(
                f"the model runs {_described(self.calls)}, where an embedding, {len(layers)} "
                "layers and one product for the head are expected; such models are not supported"
            )
        (head,) = (call for call in self.calls if isinstance(call, LinearCall))
        self.bias = head.bias

    def _replay(
        self,
        outputs: Sequence[mx.array],
        positions: mx.array | None = None,
        numbers: mx.array | None = None,
    ) -> tuple[list[Call], mx.array]:
        """The calls and the result of the model, whose taps return `outputs`.

        An embedding of positions returns `positions` (T, D). `numbers` (1, T) are the tokens'.
        """
        if numbers is None:
            numbers = mx.zeros((1, outputs[0].shape[1]), dtype=mx.int32)
        with self.taps.recording(Tape(outputs)) as tape:
            tape.positions = positions
            logits = self.taps.model(numbers)
        return tape.calls, logits

    def _checked_passes(self) -> Sequence[int | None]:
        """For each call after the first, and for the logits, the call whose output it reads.

        None where the model computes something in between, which is allowed at both ends.
        """

        def inputs(*outputs: mx.array) -> list[mx.array]:
            calls, logits = self._replay(outputs)
            return [*(call.inputs[0] for call in calls[1:]), logits]

        last = len(self.calls) - 1
        traced = trace(inputs, [call.output for call in self.calls])
        if not (traced.depends[0] <= {0} and traced.depends[-2] <= {last - 1}):
            raise BundleError(
                "the model's head reads more than its last layer, or its first layer more than the "
                "embedding: a skip past a layer is not supported"
            )
        if traced.passes[-1] != last:
            self.factor, self.cap = self._logits_shape()
        if self.bias and self.factor != 1:
            raise BundleError(
                "the head has a bias and a factor of its logits, which is not supported"
            )
        for index in range(1, len(self.taps.layers)):
            if traced.passes[index] != index:
                raise BundleError(
                    f"the model computes something between layers {index - 1} and {index}; that is "
                    "not supported"
                )
        if self.taps.positions is not None and self._adds_positions():
            return [0, *traced.passes[1:]]
        return traced.passes

    def _adds_positions(self) -> bool:
        """Whether the first layer reads the sum of token's and position's embeddings as it is.

        Raises BundleError where it reads anything else than what becomes of the sum.
        """
        first, *others = (call.output for call in self.calls)
        keys = mx.random.split(mx.random.key(0), 2)
        e, p = (mx.random.normal(first.shape, key=key) for key in keys)

        def read(e: mx.array, p: mx.array | None) -> mx.array:
            return self._replay([mx.array(e), *others], p)[0][1].inputs[0]

        apart, together = read(e, p[0]), read(e + p, None)
        if not mx.allclose(apart, together, 1e-5, 1e-5):
            raise BundleError(
                "learned positions are not added to the embedding of tokens; such "
                "models are not supported"
            )
        return bool(mx.array_equal(together, e + p).item())

    def _logits_shape(self) -> tuple[float, float | None]:
        """The factor f and the cap c of logits: c tanh(f x / c) of the products x, or f x.

        Granite and Cohere have a factor, Gemma 2 a cap. Raises BundleError where the model computes
        anything else from its products.
        """
        *before, product = (call.output for call in self.calls)

        def logits(values: mx.array) -> mx.array:
            return self._replay([*before, values])[1]

        def of(value: float) -> float:
            return float(logits(mx.full(product.shape, value)).reshape(-1)[0].item())  # type: ignore[arg-type]

        factor, cap, most = of(1.0), None, of(_HUGE)
        if most == of(2 * _HUGE) and most > abs(factor):
            cap = most
            factor = cap * math.atanh(factor / cap)
            factor = 1.0 if math.isclose(factor, 1, rel_tol=1e-6) else factor
        for size in (1.0, 1e3):
            values = size * mx.random.normal(product.shape, key=mx.random.key(0))
            found = logits(mx.array(values))
            expected = factor * values
            expected = expected if cap is None else cap * mx.tanh(expected / cap)
            if found.shape != expected.shape or not mx.allclose(found, expected, 1e-5, 1e-6):
                raise BundleError(
                    "the model changes its logits after the head's product otherwise than by a "
                    "factor or a cap; that is not supported"
                )
        return factor, cap

    def _elementwise(
        self, name: str, source: str, target: str, consumer: int
    ) -> tuple[BlockType, list[ElementwiseGraph]]:
        """The elementwise part of an end: it computes the input of call `consumer` from `source`.

        If the call reads `source` itself, there is nothing to compute, and no `target`.
        """
        factor = 1.0 if consumer == 1 else self.factor
        shape = _columns(self.calls[consumer - 1].output)
        if self.passes[consumer - 1] == consumer - 1 and factor == 1:
            return BlockType(name, source, source, {source: shape}, {}, ()), []
        values = {source: shape, target: _columns(self.calls[consumer].inputs[0])}
        sources = {source: shape} | ({_NUMBERS: (1, T, 1)} if consumer == 1 else {})

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = _length(given, sources)  # the position is that of layers: the ends see none
            _set_parameters(self.taps.model, given)
            hidden = given.get(source, mx.zeros(shape_at(shape, length)))
            # Gemma scales its embedding in place, which must not scale what the layers return
            embedded = hidden if consumer == 1 else mx.zeros(shape_at(shape, length))
            layers = [hidden] * (len(self.calls) - 2)
            outputs = [embedded, *layers, mx.zeros((1, length, 1))]
            numbers = given.get(_NUMBERS, mx.zeros((1, length, 1))).squeeze(-1)
            result = self._replay(outputs, numbers=numbers)[0][consumer].inputs[0]
            return [result if factor == 1 else result * factor]

        part = cut_graph(
            f"{name}.0",
            sources,
            self.parameters,
            [target],
            values,
            stage,
            self.taps.probe,
        )
        values |= {key: sources[key] for key in part.operation.activations}
        block_type = BlockType(name, source, target, values, part.parameters, (part.operation,))
        return block_type, [part.graph]


def _columns(array: mx.array) -> Shape:
    """The shape of an array between two blocks, (1, T, C)."""
    return 1, T, int(array.shape[-1])


# modules of mlx-lm with other matrices -> what they compute
_OPERATIONS = {
    "SwitchLinear": "experts, of which each token takes some",
    "Conv1d": "a convolution over tokens",
    "BitLinear": "packed ternary matrices",
    "MultiLinear": "a product of its own for each head",
}


def _parameters(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters outside its taps: the weights of norms and the like.

    Raises BundleError for matrices: a program has no operation with them.
    """
    for path, module in root.named_modules():
        large = {
            f"{path}.{key}".removeprefix("."): tuple(value.shape)
            for key, value in module.items()
            if isinstance(value, mx.array) and value.ndim > 1 and not key.startswith("_")
        }
        if large:
            operation = _OPERATIONS.get(type(module).__name__, "matrices that are no linear layers")
            raise BundleError(f"the model has {operation}, which is not supported: {large}")
    return {name: tuple(value.shape) for name, value in tree_flatten(root.parameters())}


def _set_parameters(root: nn.Module, given: Mapping[str, mx.array]) -> None:
    """Give a module those of a graph's inputs that are parameters, named "@name"."""
    values = [(key[1:], value) for key, value in given.items() if is_parameter(key)]
    if values:
        root.update(tree_unflatten(values))


def _described(calls: Sequence[Call]) -> str:
    """The types of the calls in order, as "1 x Embedding, 24 x Layer, 1 x Linear"."""
    names = (type(call).__name__.removesuffix("Call") for call in calls)
    return ", ".join(f"{len(list(same))} x {name}" for name, same in groupby(names))


_READ = ("q", "k", "v", "decay", "beta")  # by the gated delta rule; attention reads three of them
_MIXERS = (ConvolutionCall, DeltaCall)  # what sees other tokens without a mask


class _LayerCutter:
    """Cuts one transformer layer into a block type and its elementwise graphs."""

    def __init__(
        self, taps: Taps, tap: LayerTap, window: int | None, name: str, hidden: Shape
    ) -> None:
        self.taps, self.tap, self.window, self.name = taps, tap, window, name
        self.parameters = _parameters(tap.layer)
        own = tree_flatten(tap.layer.parameters())
        self.names_of_own = {id(value): name for name, value in own}
        self.calls, self.out = self._run(mx.zeros(shape_at(hidden, taps.probe)), None)
        self.places = {
            id(array): (number, at)
            for number, call in enumerate(self.calls)
            for at, array in enumerate(call.inputs)
        }
        self.output_shapes = [self._symbolic(call.output) for call in self.calls]
        self._check_further(hidden)
        self.values: dict[str, Shape] = {"x": hidden}
        self.names: dict[int, str] = {}  # by id of what taps read and return; q, k, v may share one
        self.outputs: list[str] = []  # names of the taps' outputs, in call order
        self.operations: list[StoredOperation] = []
        self.graphs: list[CutGraph] = []
        self.read: dict[str, tuple[int, ...]] = {}  # parameters that no graph reads

    def cut(self) -> tuple[BlockType, list[ElementwiseGraph], str]:
        """The layer as a block type, its graphs, and a signature: equal for equal layers."""
        if not self.calls:
            raise BundleError("a layer has no matrix products; such models are not supported")
        if self.tap.mask is None and not any(isinstance(call, _MIXERS) for call in self.calls):
            raise BundleError(
                f"layer {self.tap.index} is given no mask: it sees other tokens by other means "
                "than attention, as state spaces do; such models are not supported"
            )
        for call, shape in zip(self.calls, self.output_shapes, strict=True):
            if isinstance(call, LinearCall):
                output = self._add_linear(call)
            elif isinstance(call, AttentionCall):
                output = self._add_attention(call)
            elif isinstance(call, ConvolutionCall):
                output = self._add_convolution(call)
            elif isinstance(call, DeltaCall):
                output = self._add_delta(call)
            elif isinstance(call, ExpertsCall):
                output = self._add_experts(call)
            elif isinstance(call, EmbeddingCall):
                output = self._add_lookup(call)
            elif isinstance(call, PartCall):
                output = self._add_parts(call)
            else:
                raise BundleError(
                    f"a layer holds another layer, {call.name}; such models are not supported"
                )
            self.values[output] = shape
            self.outputs.append(output)
            self.names.setdefault(id(call.output), output)
        (end,) = self._reach([("out", self.out)])
        parameters = {key: v for graph in self.graphs for key, v in graph.parameters.items()}
        parameters |= self.read
        operations = tuple(self.operations)
        block_type = BlockType(self.name, "x", end, self.values, parameters, operations)
        return block_type, [graph.graph for graph in self.graphs], self._signature()

    def _signature(self) -> str:
        unnamed = [
            replace(operation, graph="") if isinstance(operation, Elementwise) else operation
            for operation in self.operations
        ]
        signatures = [graph.signature for graph in self.graphs]
        return repr([*unnamed, *signatures, *sorted(self.values.items())])

    def _run(
        self,
        x: mx.array,
        outputs: Sequence[mx.array] | None,
        position: mx.array | None = None,
    ) -> tuple[list[Call], mx.array]:
        """The calls and the result of the layer, whose taps return `outputs`."""
        with self.taps.recording(Tape(outputs)) as tape:
            out = self.tap.run(x, None if position is None else Position(position))
        return tape.calls, out

    def _check_further(self, hidden: Shape) -> None:
        """Raise BundleError where a further argument changes what the layer computes.

        Without it the layer must compute it itself, as a scale that depends on the position.
        """
        if not self.tap.further:
            return
        with self.taps.recording(Tape(drawn=True)):  # of as many tokens as the layer is tried on
            self.taps.model(mx.zeros((1, self.taps.probe), dtype=mx.int32))
        x = mx.random.normal(shape_at(hidden, self.taps.probe), key=mx.random.key(1))
        found = []
        for further in ({}, self.tap.further):
            with self.taps.recording(Tape(drawn=True)) as tape:
                out = self.tap.run(mx.array(x), None, **further)
            found.append([*(array for call in tape.calls for array in call.inputs), out])
        if not all(mx.allclose(a, b, 1e-5, 1e-5) for a, b in zip(*found, strict=True)):
            raise self.tap.problem(", ".join(self.tap.further))

    def _add_parts(self, call: PartCall) -> str:
        """Add what computes all parts of the layer's input. Returns the name of one of them."""
        parts = [one for one in self.calls if isinstance(one, PartCall)]
        self._reach([(part.name, part.inputs[0]) for part in parts])
        return self.names[id(call.inputs[0])]

    def _add_lookup(self, call: EmbeddingCall) -> str:
        """Add a look-up of the rows of tokens. Returns the output's name."""
        (numbers,) = self._reach([(f"{call.name}.in", call.inputs[0])])
        output = f"{call.name}.out"
        self.operations.append(Lookup((numbers,), (output,), call.name, not call.of_model))
        return output

    def _add_linear(self, call: LinearCall) -> str:
        """Add a product; those of one input are one operation. Returns the output's name."""
        (source,) = self._reach([(f"{call.name}.in", call.inputs[0])])
        product = Product(call.name, f"{call.name}.out", call.bias)
        last = self.operations[-1] if self.operations else None
        if isinstance(last, Linear) and last.inputs == (source,):
            self.operations[-1] = replace(last, linears=(*last.linears, product))
        else:
            self.operations.append(Linear((source,), (product,), self._is_looked_up(source)))
        return product.output

    def _is_looked_up(self, value: str) -> bool:
        """Whether a value follows from rows that were looked up, and from nothing else."""
        made_by = next((one for one in self.operations if value in one.results), None)
        if made_by is None or isinstance(made_by, Lookup):
            return made_by is not None
        return all(map(self._is_looked_up, made_by.activations))

    def _add_attention(self, call: AttentionCall) -> str:
        """Add an attention. Returns the output's name."""
        count = sum(isinstance(operation, Attention) for operation in self.operations)
        keys = [f"attention{count}.{part}" for part in "qkv"]
        q, k, v = self._reach(list(zip(keys, call.inputs, strict=True)))
        output, source = f"attention{count}.out", getattr(self.tap.layer, "source", None)
        of = "" if source is None else f"{self.taps.path}.{source}"
        sinks = "" if call.sinks is None else self._sinks(call.sinks)
        how = (call.scale, self.window, call.cap, of, sinks)
        self.operations.append(Attention((q, k, v), (output,), *how))
        return output

    def _sinks(self, sinks: mx.array) -> str:
        """The parameter that an attention's sinks are."""
        name = self.names_of_own.get(id(sinks))
        if name is None:
            raise BundleError("attention sinks are computed; such models are not supported")
        self.read[name] = self.parameters[name]
        return f"@{name}"

    def _add_convolution(self, call: ConvolutionCall) -> str:
        """Add a convolution. Returns the output's name."""
        (source,) = self._reach([(f"{call.name}.in", call.inputs[0])])
        self.read |= call.parameters
        read = (source, *(f"@{name}" for name in call.parameters))
        output, (width, *_) = f"{call.name}.out", next(iter(call.parameters.values()))[1:]
        self.operations.append(Convolution(read, (output,), width))
        return output

    def _add_delta(self, call: DeltaCall) -> str:
        """Add a gated delta rule. Returns the output's name."""
        count = sum(isinstance(operation, GatedDelta) for operation in self.operations)
        keys = [f"delta{count}.{part}" for part in _READ]
        q, k, v, decay, beta = self._reach(list(zip(keys, call.inputs, strict=True)))
        output = f"delta{count}.out"
        self.operations.append(GatedDelta((q, k, v, decay, beta), (output,)))
        return output

    def _add_experts(self, call: ExpertsCall) -> str:
        """Add experts. Returns the output's name."""
        keys = [f"{call.name}.{part}" for part in ("in", "weights", "chosen")]
        x, weights, chosen = self._reach(list(zip(keys, call.inputs, strict=True)))
        output = f"{call.name}.out"
        gate, up, down = (f"{call.name}.{part}_proj" for part in ("gate", "up", "down"))
        inputs, how = (x, weights, chosen), (call.count, call.activation, call.biased)
        self.operations.append(Experts(inputs, (output,), gate, up, down, *how))
        return output

    def _reach(self, inputs: list[tuple[str, mx.array]]) -> list[str]:
        """Names of the arrays that the next tap reads; a new graph computes those without a name.

        `inputs` are the arrays with the names that they get.
        """
        fresh = [(key, array) for key, array in inputs if id(array) not in self.names]
        if fresh:
            for key, array in fresh:
                self.names[id(array)] = key
                self.values[key] = self._symbolic(array)
            places = [self.places.get(id(array)) for _, array in fresh]
            graph = self._stage([key for key, _ in fresh], places)
            self.operations.append(graph.operation)
            self.graphs.append(graph)
        return [self.names[id(array)] for _, array in inputs]

    def _stage(self, targets: list[str], places: list[tuple[int, int] | None]) -> CutGraph:
        """The graph that computes inputs of taps, or the result, from the outputs before them.

        places: which call reads each target, and as which of its inputs; None for the result.
        """
        name = f"{self.name}.{len(self.graphs)}"
        available, hidden = list(self.outputs), self.values["x"]
        sources = {"x": hidden, **{key: self.values[key] for key in available}}

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = _length(given, sources)
            x = given.get("x", mx.zeros(shape_at(hidden, length)))
            outputs = [mx.zeros(shape_at(shape, length)) for shape in self.output_shapes]
            for index, key in enumerate(available):
                outputs[index] = given.get(key, outputs[index])
            _set_parameters(self.tap.layer, given)
            calls, out = self._run(x, outputs, position)
            return [out if at is None else calls[at[0]].inputs[at[1]] for at in places]

        return cut_graph(
            name, sources, self.parameters, targets, self.values, stage, self.taps.probe
        )

    def _symbolic(self, array: mx.array) -> Shape:
        return tuple(T if size == self.taps.probe else size for size in array.shape)


def _length(given: Mapping[str, mx.array], shapes: dict[str, Shape]) -> int:
    """The number of tokens of arrays by name."""
    for key, array in given.items():
        if key in shapes:
            return int(array.shape[token_axis(shapes[key])])
    raise BundleError(
        "the model computes something between two products that depends on no activation; that is "
        "not supported"
    )
