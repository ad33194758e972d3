"""Cutting an mlx-lm model into blocks of matrix products, attention and elementwise graphs.

The model runs over taps (see `export.cut.taps`), which record its matrix products and attention in
order, with their inputs. What the model computes between these is traced and becomes elementwise
graphs. Nothing here is specific to an architecture. A model that a program cannot express is
refused: if it has a matrix outside linear layers, an operation between two layers, or a mask that
is neither causal nor a sliding window.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from msgspec.structs import replace

from export.cut.graphs import CutGraph, ElementwiseGraph, cut_graph
from export.cut.taps import (
    MASK,
    AttentionCall,
    Call,
    EmbeddingCall,
    LayerCall,
    LinearCall,
    Position,
    Tape,
    Taps,
    attention_windows,
    probe_length,
)
from export.cut.trace import trace
from export.sources.families import build_model
from runtime.arrays.stored import Block
from runtime.core.errors import BundleError
from runtime.operations.attention import Attention
from runtime.operations.elementwise import Elementwise
from runtime.operations.embedding import Embedding
from runtime.operations.head import Head
from runtime.operations.linear import Linear, Product
from runtime.operations.program import BlockType
from runtime.operations.table import StoredOperation
from runtime.operations.values import Shape, T, shape_at


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
        config: what its `ModelArgs.from_dict` takes.

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
    module = importlib.import_module(f"mlx_lm.models.{family}")
    taps = Taps(module, model, probe_length(model, config))
    cut = Cut()
    _cut_ends(taps, cut)
    windows = attention_windows(taps, config)
    seen: dict[str, str] = {}
    layers: list[Block] = []
    for index, layer in enumerate(taps.layers):
        name = f"layer{len(seen)}"
        block_type, graphs, signature = _Cutter(taps, layer, windows[index]).cut(name)
        if signature not in seen:
            seen[signature] = name
            cut.block_types[name] = block_type
            cut.graphs += graphs
        layers.append(Block(f"model.layers.{index}", seen[signature]))
    cut.blocks[1:1] = layers
    return cut


def _cut_ends(taps: Taps, cut: Cut) -> None:
    """Cut what lies before the first layer, the embedding, and after the last, the head."""
    tape = Tape()
    with taps.recording(tape):
        taps.model(mx.zeros((1, taps.probe), dtype=mx.int32))
    calls = tape.calls
    layers = [LayerCall] * len(taps.layers)
    if [type(call) for call in calls] != [EmbeddingCall, *layers, LinearCall]:
        raise BundleError(
            f"the model runs {_described(calls)}, where an embedding, {len(layers)} layers and one "
            "product for the head are expected; such models are not supported"
        )
    width = calls[0].output.shape[-1]

    def replay(outputs: Sequence[mx.array]) -> tuple[list[Call], mx.array]:
        with taps.recording(Tape(outputs)) as tape:
            final = taps.model(mx.zeros((1, outputs[0].shape[1]), dtype=mx.int32))
        return tape.calls, final

    def ends(*outputs: mx.array) -> list[mx.array]:
        calls, final = replay(outputs)
        return [*(call.inputs[0] for call in calls[1:]), final]

    traced = trace(ends, [call.output for call in calls])
    passes = traced.passes
    if not (traced.depends[0] <= {0} and traced.depends[-2] <= {len(calls) - 2}):
        raise BundleError(
            "the model's head reads more than its last layer, or its first layer more than the "
            "embedding: a skip past a layer is not supported"
        )
    if passes[-1] != len(calls) - 1:
        raise BundleError(
            "the model changes its logits after the head's product, as soft-capping does; that is "
            "not supported"
        )
    for index in range(1, len(taps.layers)):
        if passes[index] != index:
            raise BundleError(
                f"the model computes something between layers {index - 1} and {index}; that is not "
                "supported"
            )
    parameters = _parameters(taps.model)
    shape: Shape = (1, T, width)

    def end(
        name: str, source: str, target: str, consumer: int
    ) -> tuple[list[StoredOperation], BlockType]:
        alias = passes[consumer - 1] == consumer - 1
        output = source if alias else target
        values = {source: shape, output: shape}
        if alias:
            return [], BlockType(name, source, output, values, {}, ())

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = _length(given, values)  # the position is that of layers: the ends see none
            _set(taps.model, {k[1:]: v for k, v in given.items() if k.startswith("@")})
            outputs = [given.get(source, mx.zeros((1, length, width)))] * (len(calls) - 1)
            outputs.append(mx.zeros((1, length, 1)))
            return [replay(outputs)[0][consumer].inputs[0]]

        made = cut_graph(
            f"{name}.0", {source: shape}, parameters, [target], values, stage, taps.probe
        )
        cut.graphs.append(made.graph)
        return [made.operation], BlockType(name, source, output, values, made.parameters, ())

    operations, block_type = end("embed", "e", "x", 1)
    lookup = Embedding(("e",), calls[0].name)
    cut.block_types["embed"] = replace(block_type, input="", operations=(lookup, *operations))
    operations, block_type = end("head", "x", "h", len(calls) - 1)
    head = Head((block_type.output,), calls[-1].name)
    cut.block_types["head"] = replace(block_type, operations=(*operations, head))
    cut.blocks += [Block("", "embed"), Block("", "head")]


def _parameters(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters outside its taps: the weights of norms and the like."""
    found = {name: tuple(value.shape) for name, value in tree_flatten(root.parameters())}
    large = {name: shape for name, shape in found.items() if len(shape) > 1}
    if large:
        raise BundleError(
            f"the model has matrices that are not linear layers, which is not supported: {large}"
        )
    return found


def _set(root: nn.Module, values: dict[str, mx.array]) -> None:
    if values:
        root.update(tree_unflatten(list(values.items())))


def _described(calls: Sequence[Call]) -> str:
    """The types of the calls in order, as "1 x Embedding, 24 x Layer, 1 x Linear"."""
    names = (type(call).__name__.removesuffix("Call") for call in calls)
    return ", ".join(f"{len(list(same))} x {name}" for name, same in groupby(names))


class _Cutter:
    """Cuts one transformer layer into a block type and its elementwise graphs."""

    def __init__(self, taps: Taps, layer: nn.Module, window: int | None) -> None:
        self.taps, self.layer, self.window = taps, layer, window
        self.parameters = _parameters(layer)

    def run(
        self,
        x: mx.array,
        outputs: Sequence[mx.array] | None,
        position: mx.array | None = None,
    ) -> tuple[list[Call], mx.array]:
        with self.taps.recording(Tape(outputs)) as tape:
            out = self.layer(x, MASK, None if position is None else Position(position))
        return tape.calls, out

    def cut(self, name: str) -> tuple[BlockType, list[ElementwiseGraph], str]:
        width = self._width()
        x = mx.zeros((1, self.taps.probe, width))
        calls, out = self.run(x, None)
        if not calls:
            raise BundleError("a layer has no matrix products; such models are not supported")
        values: dict[str, Shape] = {"x": (1, T, width)}
        known: dict[int, str] = {}  # names by id of the arrays that taps read; q, k, v share one
        outputs: list[str] = []  # names of the taps' outputs, in call order
        operations: list[StoredOperation] = []
        graphs: list[ElementwiseGraph] = []
        signatures: list[str] = []
        needed: dict[str, tuple[int, ...]] = {}
        attentions = 0

        def reach(targets: list[tuple[str, mx.array]], upto: int) -> list[str]:
            """Names of the arrays that a tap reads; those not yet known come from a new graph."""
            fresh = [(key, array) for key, array in targets if id(array) not in known]
            if fresh:
                for key, array in fresh:
                    known[id(array)] = key
                    values[key] = self._symbolic(array)
                made = self._stage(
                    f"{name}.{len(graphs)}", [k for k, _ in fresh], values, outputs[:upto], upto
                )
                operations.append(made.operation)
                graphs.append(made.graph)
                signatures.append(made.signature)
                needed.update(made.parameters)
            return [known[id(array)] for _, array in targets]

        for index, call in enumerate(calls):
            if isinstance(call, LinearCall):
                (source,) = reach([(f"{call.name}.in", call.inputs[0])], index)
                product = Product(call.name, f"{call.name}.out", call.bias)
                target = product.output
                last = operations[-1] if operations else None
                if isinstance(last, Linear) and last.inputs == (source,):
                    operations[-1] = replace(last, linears=(*last.linears, product))
                else:
                    operations.append(Linear((source,), (product,)))
            elif isinstance(call, AttentionCall):
                prefix = f"attention{attentions}"
                attentions += 1
                keys = [f"{prefix}.{part}" for part in "qkv"]
                q, k, v = reach(list(zip(keys, call.inputs, strict=True)), index)
                target = f"{prefix}.out"
                operations.append(Attention((q, k, v), (target,), call.scale, self.window))
            else:
                raise BundleError(
                    f"a layer holds an embedding, {call.name}; such models are not supported"
                )
            values[target] = self._symbolic(call.output)
            outputs.append(target)
        (end,) = reach([("out", out)], len(calls))
        block_type = BlockType(name, "x", end, values, needed, tuple(operations))
        unnamed = [
            replace(one, graph="") if isinstance(one, Elementwise) else one for one in operations
        ]
        signature = repr([*unnamed, *signatures, *sorted(values.items())])
        return block_type, graphs, signature

    def _width(self) -> int:
        embedding = self.taps.inner.embed_tokens
        return int(embedding.columns)

    def _stage(
        self,
        name: str,
        targets: list[str],
        values: dict[str, Shape],
        available: list[str],
        upto: int,
    ) -> CutGraph:
        sources = {"x": values["x"], **{key: values[key] for key in available}}
        probe_calls, _ = self.run(mx.zeros(shape_at(values["x"], self.taps.probe)), None)
        shapes = [self._symbolic(call.output) for call in probe_calls]

        def stage(given: Mapping[str, mx.array], position: mx.array | None) -> list[mx.array]:
            length = _length(given, sources)
            x = given.get("x", mx.zeros(shape_at(values["x"], length)))
            feed = [
                given[available[i]]
                if i < len(available) and available[i] in given
                else mx.zeros(shape_at(shapes[i], length))
                for i in range(len(shapes))
            ]
            _set(self.layer, {k[1:]: v for k, v in given.items() if k.startswith("@")})
            calls, out = self.run(x, feed, position)
            if targets == ["out"]:
                return [out]
            return [calls[upto].inputs[_part(target)] for target in targets]

        return cut_graph(name, sources, self.parameters, targets, values, stage, self.taps.probe)

    def _symbolic(self, array: mx.array) -> Shape:
        return tuple(T if size == self.taps.probe else size for size in array.shape)


def _part(target: str) -> int:
    """Which of a tap's inputs a value is: attention has q, k and v, a product has one."""
    return {".q": 0, ".k": 1, ".v": 2}.get(target[-2:], 0)


def _length(given: Mapping[str, mx.array], shapes: dict[str, Shape]) -> int:
    for key, array in given.items():
        if key in shapes:
            return int(array.shape[list(shapes[key]).index(T)])
    raise BundleError(
        "the model computes something between two products that depends on no activation; that is "
        "not supported"
    )
