"""Cutting the ends of a model: before the first layer the embedding, after the last the head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import mlx.core as mx
from msgspec.structs import replace

from export.cut.graphs import ElementwiseGraph, cut_graph
from export.cut.parameters import parameters_of, set_parameters, token_count
from export.cut.tape import Call, EmbeddingCall, LayerCall, LinearCall, Tape
from export.cut.taps import Taps
from export.cut.trace import trace
from runtime.core.errors import BundleError
from runtime.operations.embedding import Embedding
from runtime.operations.head import Head
from runtime.operations.program import BlockType
from runtime.operations.values import Shape, T, shape_at

_NUMBERS = "numbers"  # the value with those of the tokens, (1, T, 1)
_HUGE = 1e9  # a product that any cap of logits cuts off


class EndsCutter:
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
        self.parameters = parameters_of(taps.model)
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
            made = logits(mx.array(values))
            expected = factor * values
            expected = expected if cap is None else cap * mx.tanh(expected / cap)
            if made.shape != expected.shape or not mx.allclose(made, expected, 1e-5, 1e-6):
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
        shape = columns_of(self.calls[consumer - 1].output)
        if self.passes[consumer - 1] == consumer - 1 and factor == 1:
            return BlockType(name, source, source, {source: shape}, {}, ()), []
        values = {source: shape, target: columns_of(self.calls[consumer].inputs[0])}
        sources = {source: shape} | ({_NUMBERS: (1, T, 1)} if consumer == 1 else {})

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = token_count(given, sources)  # the ends see no position
            set_parameters(self.taps.model, given)
            hidden = given.get(source, mx.zeros(shape_at(shape, length)))
            # Gemma scales its embedding in place, which must not scale what the layers return
            embedded = hidden if consumer == 1 else mx.zeros(shape_at(shape, length))
            layers = [hidden] * (len(self.calls) - 2)
            outputs = [embedded, *layers, mx.zeros((1, length, 1))]
            numbers = given.get(_NUMBERS, mx.zeros((1, length, 1))).squeeze(-1)
            result = self._replay(outputs, numbers=numbers)[0][consumer].inputs[0]
            return [result if factor == 1 else result * factor]

        part = cut_graph(
            f"{name}.0", sources, self.parameters, [target], values, stage, self.taps.probe
        )
        values |= {key: sources[key] for key in part.operation.activations}
        block_type = BlockType(name, source, target, values, part.parameters, (part.operation,))
        return block_type, [part]


def columns_of(array: mx.array) -> Shape:
    """The shape of an array between two blocks, (1, T, C)."""
    return 1, T, int(array.shape[-1])


def _described(calls: Sequence[Call]) -> str:
    """The types of the calls in order, as "1 x Embedding, 24 x Layer, 1 x Linear"."""
    names = (type(call).__name__.removesuffix("Call") for call in calls)
    return ", ".join(f"{len(list(same))} x {name}" for name, same in groupby(names))
