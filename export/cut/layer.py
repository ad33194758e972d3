"""Cutting a transformer layer into matrix products, attention and the like, and graphs between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial, singledispatchmethod

import mlx.core as mx
from mlx.utils import tree_flatten
from msgspec.structs import replace

from export.cut.graphs import ElementwiseGraph, cut_graph
from export.cut.parameters import parameters_of, set_parameters, token_count
from export.cut.tape import (
    AttentionCall,
    Call,
    ConvolutionCall,
    DeltaCall,
    EmbeddingCall,
    ExpertsCall,
    LinearCall,
    PartCall,
    Tape,
)
from export.cut.taps import LayerTap, Position, Taps
from export.cut.trace import trace
from runtime.core.errors import BundleError
from runtime.operations.attention import Attention
from runtime.operations.convolution import Convolution
from runtime.operations.embedding import Lookup
from runtime.operations.experts import Experts
from runtime.operations.gated_delta import GatedDelta
from runtime.operations.linear import Linear, Product
from runtime.operations.program import BlockType, StoredOperation
from runtime.operations.values import Shape, T, shape_at

_READ = ("q", "k", "v", "decay", "beta")  # by the gated delta rule; attention reads three of them
_MIXERS = (ConvolutionCall, DeltaCall)  # what sees other tokens without a mask


class LayerCutter:
    """Cuts one transformer layer into a block type and its elementwise graphs."""

    def __init__(
        self, taps: Taps, tap: LayerTap, window: int | None, name: str, hidden: Shape
    ) -> None:
        self.taps, self.tap, self.window, self.name = taps, tap, window, name
        self.parameters = parameters_of(tap.layer)
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
        self.graphs: list[ElementwiseGraph] = []
        self.read: dict[str, tuple[int, ...]] = {}  # parameters that no graph reads

    def signature(self) -> str:
        """Equal for layers that are cut alike, and far quicker than cutting.

        It says how the taps are called, what the whole layer computes from all that they return,
        and the gradients of that: graphs are parts of these.
        """
        layer, made = self.tap.layer, [call.output for call in self.calls]
        own = dict(tree_flatten(layer.parameters()))
        parameters = {f"@{name}": own[name] for name in self.parameters}

        def whole(
            x: mx.array, position: mx.array, *others: mx.array, placed: bool
        ) -> list[mx.array]:
            set_parameters(layer, dict(zip(parameters, others[len(made) :], strict=True)))
            calls, out = self._run(x, others, position if placed else None)
            return [*(array for call in calls for array in call.inputs), out]

        x = mx.zeros(shape_at(self.values["x"], self.taps.probe))
        inputs = [x, mx.array(0, mx.int32), *made, *parameters.values()]
        fixed = slice(2 + len(made), len(inputs))

        def backward(*arrays: mx.array) -> list[mx.array]:
            """Gradients of x and of what the taps return, from those of all results."""

            def moved(x: mx.array, *made: mx.array) -> list[mx.array]:
                results = whole(x, arrays[1], *made, *arrays[fixed], placed=False)
                return [result + 0 for result in results]  # MLX omits those that stop gradients

            primals = [arrays[0], *arrays[2 : fixed.start]]
            return mx.vjp(moved, primals, list(arrays[fixed.stop :]))[1]

        gradients = [mx.zeros_like(result) for result in whole(*inputs, placed=False)]
        traced = [
            trace(function, given, differentiated=True).signature
            for function, given in (
                (partial(whole, placed=False), inputs),
                (partial(whole, placed=True), inputs),
                (backward, [*inputs, *gradients]),
            )
        ]
        set_parameters(layer, parameters)
        number: dict[int, int] = {}  # of each array, by its id
        called: list[object] = []
        for call in self.calls:
            arrays = [number.setdefault(id(a), len(number)) for a in (*call.inputs, call.output)]
            further = fields(call)[len(fields(Call)) :]
            settings = [self._said(getattr(call, field.name)) for field in further]
            called.append((type(call).__name__, call.name, arrays, settings))
        facts = (self.window, getattr(layer, "source", None), self.tap.mask is None)
        return repr((self.values, self.parameters, facts, called, traced))

    def _said(self, setting: object) -> object:
        """A setting of a call; of arrays, only which parameters they are."""
        if isinstance(setting, mx.array):
            return self.names_of_own.get(id(setting), "computed")
        return setting

    def cut(self) -> tuple[BlockType, list[ElementwiseGraph]]:
        """The layer as a block type, and its graphs."""
        if not self.calls:
            raise BundleError("a layer has no matrix products; such models are not supported")
        if self.tap.mask is None and not any(isinstance(call, _MIXERS) for call in self.calls):
            raise BundleError(
                f"layer {self.tap.index} is given no mask: it sees other tokens by other means "
                "than attention, as state spaces do; such models are not supported"
            )
        for call, shape in zip(self.calls, self.output_shapes, strict=True):
            output = self._add(call)
            self.values[output] = shape
            self.outputs.append(output)
            self.names.setdefault(id(call.output), output)
        (end,) = self._reach([("out", self.out)])
        parameters = {key: v for graph in self.graphs for key, v in graph.parameters.items()}
        parameters |= self.read
        operations = tuple(self.operations)
        block_type = BlockType(self.name, "x", end, self.values, parameters, operations)
        return block_type, self.graphs

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
        tried = []
        for further in ({}, self.tap.further):
            with self.taps.recording(Tape(drawn=True)) as tape:
                out = self.tap.run(mx.array(x), None, **further)
            tried.append([*(array for call in tape.calls for array in call.inputs), out])
        if not all(mx.allclose(a, b, 1e-5, 1e-5) for a, b in zip(*tried, strict=True)):
            raise self.tap.problem(", ".join(self.tap.further))

    @singledispatchmethod
    def _add(self, call: Call) -> str:
        """Add the operation that a call is. Returns the output's name."""
        raise BundleError(
            f"a layer holds another layer, {call.name}; such models are not supported"
        )

    @_add.register
    def _add_parts(self, call: PartCall) -> str:
        """Add what computes all parts of the layer's input. Returns the name of one of them."""
        parts = [part for part in self.calls if isinstance(part, PartCall)]
        self._reach([(part.name, part.inputs[0]) for part in parts])
        return self.names[id(call.inputs[0])]

    @_add.register
    def _add_lookup(self, call: EmbeddingCall) -> str:
        (numbers,) = self._reach([(f"{call.name}.in", call.inputs[0])])
        output = f"{call.name}.out"
        self.operations.append(Lookup((numbers,), (output,), call.name, not call.of_model))
        return output

    @_add.register
    def _add_linear(self, call: LinearCall) -> str:
        """Products of one input are one operation."""
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
        made_by = next(
            (operation for operation in self.operations if value in operation.results), None
        )
        if made_by is None or isinstance(made_by, Lookup):
            return made_by is not None
        return all(map(self._is_looked_up, made_by.activations))

    @_add.register
    def _add_attention(self, call: AttentionCall) -> str:
        count = sum(isinstance(operation, Attention) for operation in self.operations)
        keys = [f"attention{count}.{part}" for part in "qkv"]
        q, k, v = self._reach(list(zip(keys, call.inputs, strict=True)))
        output, source = f"attention{count}.out", getattr(self.tap.layer, "source", None)
        of = "" if source is None else f"{self.taps.path}.{source}"
        sinks = "" if call.sinks is None else self._sinks(call.sinks)
        settings = (call.scale, self.window, call.cap, of, sinks)
        self.operations.append(Attention((q, k, v), (output,), *settings))
        return output

    def _sinks(self, sinks: mx.array) -> str:
        """The parameter that an attention's sinks are."""
        name = self.names_of_own.get(id(sinks))
        if name is None:
            raise BundleError("attention sinks are computed; such models are not supported")
        self.read[name] = self.parameters[name]
        return f"@{name}"

    @_add.register
    def _add_convolution(self, call: ConvolutionCall) -> str:
        (source,) = self._reach([(f"{call.name}.in", call.inputs[0])])
        self.read |= call.parameters
        read = (source, *(f"@{name}" for name in call.parameters))
        output, (width, *_) = f"{call.name}.out", next(iter(call.parameters.values()))[1:]
        self.operations.append(Convolution(read, (output,), width))
        return output

    @_add.register
    def _add_delta(self, call: DeltaCall) -> str:
        count = sum(isinstance(operation, GatedDelta) for operation in self.operations)
        keys = [f"delta{count}.{part}" for part in _READ]
        q, k, v, decay, beta = self._reach(list(zip(keys, call.inputs, strict=True)))
        output = f"delta{count}.out"
        self.operations.append(GatedDelta((q, k, v, decay, beta), (output,)))
        return output

    @_add.register
    def _add_experts(self, call: ExpertsCall) -> str:
        keys = [f"{call.name}.{part}" for part in ("in", "weights", "chosen")]
        x, weights, chosen = self._reach(list(zip(keys, call.inputs, strict=True)))
        output = f"{call.name}.out"
        gate, up, down = (f"{call.name}.{part}_proj" for part in ("gate", "up", "down"))
        inputs, settings = (x, weights, chosen), (call.count, call.activation, call.biased)
        self.operations.append(Experts(inputs, (output,), gate, up, down, *settings))
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

    def _stage(self, targets: list[str], places: list[tuple[int, int] | None]) -> ElementwiseGraph:
        """The graph that computes inputs of taps, or the result, from the outputs before them.

        places: which call reads each target, and as which of its inputs; None for the result.
        """
        name = f"{self.name}.{len(self.graphs)}"
        available, hidden = list(self.outputs), self.values["x"]
        sources = {"x": hidden, **{key: self.values[key] for key in available}}

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = token_count(given, sources)
            x = given.get("x", mx.zeros(shape_at(hidden, length)))
            outputs = [mx.zeros(shape_at(shape, length)) for shape in self.output_shapes]
            for index, key in enumerate(available):
                outputs[index] = given.get(key, outputs[index])
            set_parameters(self.tap.layer, given)
            calls, out = self._run(x, outputs, position)
            return [out if at is None else calls[at[0]].inputs[at[1]] for at in places]

        return cut_graph(
            name, sources, self.parameters, targets, self.values, stage, self.taps.probe
        )

    def _symbolic(self, array: mx.array) -> Shape:
        return tuple(T if size == self.taps.probe else size for size in array.shape)
