"""The operation Elementwise: a serialized MLX function between matrix products.

It computes norms, rotary embeddings, activations or residual sums. One graph is for the forward,
one for its vector-Jacobian product (vjp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import ClassVar, Literal

from runtime.arrays.stored import Graph, pages
from runtime.operations.base import Call, Function, Operation, Scope, require
from runtime.operations.execution import Execution
from runtime.operations.gated import PARAMETERS, Gated
from runtime.operations.values import (
    DECODED_TOKENS,
    F32,
    Shape,
    T,
    dtype_of,
    graph_key,
    is_parameter,
    shape_at,
    token_tile_unit,
)

# MLX's silu, gelu_approx, gelu, relu and relu2, and xIELU (arXiv 2411.13010), with its parameters
Activation = Literal["", "silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]


class Placed(Function, frozen=True):
    """The serialized function `graph` of `inputs` and of the first token's position.

    It takes the place of an `Elementwise` operation whose results depend on positions, where a
    sequence is decoded; it is never in a bundle.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: str

    takes_parameters: ClassVar[bool] = True

    def key(self, tokens: int) -> str:
        """The key of the function for so many tokens."""
        return graph_key(self.graph, "decode", tokens)

    def graph_keys(self, bucket: int, backward: bool) -> tuple[str, ...]:
        return (self.key(bucket),)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The graph's workspace, and its unwanted results."""
        graph = execution.tables.graphs[self.key(execution.bucket)]
        unwanted = sum(
            math.prod(shape) * F32
            for name, shape in zip(self.outputs, graph.outputs, strict=True)
            if name not in call.wanted
        )
        return graph.workspace_bytes + unwanted


class Elementwise(Function, frozen=True):
    """A serialized function of `inputs`, and its vjp.

    The vjp takes `vjp_inputs` (cotangents are `~name`) and returns the gradients of `vjp_outputs`.
    `vjp_same` says for each gradient which array it is: a cotangent, the gradient of an earlier
    value, or "" for a new array. `tokenwise` says that a graph for a tile of tokens serves any
    number of tiles. `position` says that results depend on where in the sequence a token is; then
    decoding has a graph of its own, which takes the position of the first token besides, and graphs
    for tiles take it too. `gated` names f if the graph computes f(g) * u of two inputs (g, u) or of
    the halves of one, or f(g); on a CPU a kernel then computes this without the graph.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: str
    vjp_inputs: tuple[str, ...] = ()
    vjp_outputs: tuple[str, ...] = ()
    vjp_same: tuple[str, ...] = ()
    tokenwise: bool = False
    position: bool = False
    gated: Activation = ""

    takes_parameters: ClassVar[bool] = True
    cheap: ClassVar[bool] = True
    any_dtype: ClassVar[bool] = True

    def graph_tokens(self, bucket: int, one_evaluation: bool = False) -> int:
        """The number of tokens that a graph takes at a sequence bucket.

        If it runs by tiles, this is one tile, which then runs several times, unless the operation
        is one evaluation.
        """
        return token_tile_unit(bucket) if self.tokenwise and not one_evaluation else bucket

    @staticmethod
    def dtypes(device: str) -> tuple[str, ...]:
        """The types of values that there are graphs for."""
        return ("float32", "bfloat16") if device == "gpu" else ("float32",)

    def graph_lengths(self, bucket: int, device: str) -> set[int]:
        """The numbers of tokens that its graphs for a sequence bucket are traced at."""
        ways = (False, True) if device == "gpu" else (False,)
        return {self.graph_tokens(bucket, one_evaluation) for one_evaluation in ways}

    @property
    def placed(self) -> bool:
        """Whether its graphs take the position of the first token, as their last input."""
        return self.tokenwise and self.position

    @property
    def decoding_direction(self) -> str:
        """The direction of the graph that decodes: the forward, if it takes no position."""
        return "decode" if self.position else "forward"

    def on_device(self, device: str) -> Operation:
        """On a CPU, `Gated` for an activation: its kernel needs less memory and time."""
        if self.gated and device == "cpu":
            return Gated(self.inputs, self.outputs[:1], self.gated)  # type: ignore[arg-type]
        return self

    def decoding(self, context: int) -> Operation:
        """`Placed` if results depend on positions."""
        return Placed(self.inputs, self.outputs, self.graph) if self.position else self

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(name for name in self.vjp_inputs if name[0] not in "@~")

    @property
    def gradients(self) -> tuple[str, ...]:
        return self.vjp_outputs

    @property
    def shared_gradients(self) -> tuple[str, ...]:
        return self.vjp_same

    def graph_keys(self, bucket: int, backward: bool) -> tuple[str, ...]:
        tokens = self.graph_tokens(bucket)
        directions = ("forward", "vjp") if backward else ("forward",)
        return tuple(graph_key(self.graph, direction, tokens) for direction in directions)

    def views(self, execution: Execution) -> Mapping[str, str]:
        """As its graph says; results of tiles are put together in arrays of their own."""
        tokens = self.graph_tokens(execution.bucket)
        graph = self._graph("forward", tokens, execution)
        if graph is None or tokens < execution.bucket:
            return {}
        pairs = zip(self.outputs, graph.views, strict=False)
        return {name: self.inputs[place] for name, place in pairs if place >= 0}

    def widened(self, backward: bool) -> tuple[str, ...]:
        return ()  # its graphs are of every type

    def _graph(self, direction: str, tokens: int, execution: Execution) -> Graph | None:
        """The graph of values of the execution's type; that of float32 takes no less memory.

        A plan for a GPU may be made where graphs are for a CPU only.
        """
        graphs = execution.tables.graphs
        of_type = graph_key(self.graph, direction, tokens, execution.value_dtype)
        return graphs.get(of_type) or graphs.get(graph_key(self.graph, direction, tokens))

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The graph's workspace, and its unwanted results; all results if it runs tile by tile."""
        tokens = self.graph_tokens(execution.bucket)
        direction = "vjp" if call.backward else "forward"
        graph = self._graph(direction, tokens, execution)
        assert graph is not None
        made = self.vjp_outputs if call.backward else self.outputs
        same = self.vjp_same if call.backward else ("",) * len(made)
        held = {
            shared or name for name, shared in zip(made, same, strict=True) if name in call.wanted
        }
        results = sum(
            math.prod(shape) * call.item_bytes
            for name, shared, shape in zip(made, same, graph.outputs, strict=True)
            if not shared and (tokens < call.tokens or name not in held)
        )
        return graph.workspace_bytes + self._ahead(graph, call) + results

    @staticmethod
    def _ahead(graph: Graph, call: Call) -> int:
        """Bytes that MLX was seen to allocate ahead of its limit, in a vjp of all tokens.

        It is a result: MLX waits there for about each fifth operation alone. The gradient of a
        value that is split is the sum of an array as large for each part, so there it is two.
        """
        whole = call.backward and any(call.tokens in shape for shape in graph.outputs)
        most = max((math.prod(shape) * call.item_bytes for shape in graph.outputs), default=0)
        ahead = 2 if len(graph.outputs) == 1 else 1
        return ahead * most if whole and graph.workspace_bytes > most else 0

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """The graph's own bytes, and its unwanted results.

        Where there are graphs for tiles only, as on a CPU, those of all tiles.
        """
        direction = "vjp" if call.backward else "forward"
        graph, count = self._graph(direction, call.tokens, execution), 1
        if graph is None:
            tile = self.graph_tokens(call.tokens)
            graph, count = self._graph(direction, tile, execution), call.tokens // tile
        assert graph is not None and graph.allocated_bytes is not None  # the planner has asked
        made = self.vjp_outputs if call.backward else self.outputs
        unwanted = sum(pages(call.bytes_of(name)) for name in made if name not in call.wanted)
        return graph.allocated_bytes * count + unwanted

    def check(self, scope: Scope) -> None:
        where = f"{scope.where}: elementwise graph {self.graph}"
        distinct = len(set(self.inputs)) == len(self.inputs)
        require(distinct and bool(self.outputs), f"{where}: its inputs or outputs")
        for name in self.vjp_inputs:
            expected = self.outputs if name.startswith("~") else self.inputs
            require(name.removeprefix("~") in expected, f"{where}: its vjp wants {name}")
        activations = set(self.activations)
        returned = (len(self.vjp_outputs), set(self.vjp_outputs))
        require(returned == (len(activations), activations), f"{where}: vjp: {self.vjp_outputs}")
        self._check_same(where, scope.values)
        if self.tokenwise:
            for name in (*activations, *self.outputs):
                require(
                    scope.values[name].count(T) == 1, f"{where}: {name} has not one axis of tokens"
                )
        # whether the graph really computes this cannot be checked without running it
        good = not self.gated or self.may_be_gated(scope.values)
        if self.gated and good:
            shapes = [scope.parameters[name[1:]] for name in self.inputs if is_parameter(name)]
            good = [*map(math.prod, shapes)] == [1] * PARAMETERS.get(self.gated, 0)
        require(good, f"{where}: {self.gated} of {self.inputs}, {self.vjp_inputs}")
        self._check_graphs(where, scope)

    def _check_graphs(self, where: str, scope: Scope) -> None:
        """Check that there are graphs of the right signatures: for every bucket, and to decode.

        A bundle may come without graphs, which are then traced where it is used.
        """
        tables = scope.tables
        if not tables.graphs:
            return

        def shapes(names: Sequence[str], tokens: int) -> tuple[tuple[int, ...], ...]:
            return tuple(
                scope.parameters[name[1:]]
                if is_parameter(name)
                else shape_at(scope.values[name.removeprefix("~")], tokens)
                for name in names
            )

        def check_graph(
            direction: str,
            tokens: int,
            inputs: tuple[tuple[int, ...], ...],
            outputs: Sequence[str],
            dtype: str = "float32",
        ) -> None:
            graph = tables.graphs.get(graph_key(self.graph, direction, tokens, dtype))
            lacking = f"{where}: no {direction} graph for {tokens} tokens in {dtype}"
            require(graph is not None, lacking)
            assert graph is not None
            for expected, shapes_there in (
                (inputs, graph.inputs),
                (shapes(outputs, tokens), graph.outputs),
            ):
                require(shapes_there == expected, f"{where}: signature {shapes_there}")

        position: tuple[tuple[int, ...], ...] = ((),) if self.placed else ()
        lengths = [self.graph_lengths(bucket, tables.device) for bucket in tables.buckets]
        dtypes = {"float32", *map(dtype_of, tables.graphs)}  # of older bundles float32 only
        each = product(sorted(set[int]().union(*lengths)), sorted(dtypes))
        for tokens, dtype in each:
            given = (*shapes(self.inputs, tokens), *position)
            check_graph("forward", tokens, given, self.outputs, dtype)
            given = (*shapes(self.vjp_inputs, tokens), *position)
            check_graph("vjp", tokens, given, self.vjp_outputs, dtype)
        for tokens in DECODED_TOKENS:
            inputs = shapes(self.inputs, tokens)
            check_graph(
                self.decoding_direction,
                tokens,
                (*inputs, ()) if self.position else inputs,
                self.outputs,
            )

    def _check_same(self, where: str, values: Mapping[str, Shape]) -> None:
        """Check that each gradient is named a cotangent, an earlier gradient, or a new array.

        Whether the graph really returns that array cannot be checked without running it.
        """
        as_many = len(self.vjp_same) == len(self.vjp_outputs)
        require(as_many, f"{where}: its vjp's gradients: {self.vjp_same}")
        own: set[str] = set()
        for name, same in zip(self.vjp_outputs, self.vjp_same, strict=True):
            if not same:
                own.add(name)
                continue
            known = same in (self.vjp_inputs if same.startswith("~") else own)
            alike = known and values[same.removeprefix("~")] == values[name]
            require(alike, f"{where}: its gradient of {name} is said to be {same}")

    def may_be_gated(self, values: Mapping[str, Shape]) -> bool:
        """Whether its signature is that of an activation: see `gated`."""
        names = (*self.activations, *self.outputs)
        if len(self.outputs) != 1 or not set(names) <= set(values):
            return False
        *tokens, width = values[self.outputs[0]]
        shapes = [values[name] for name in self.activations]
        halves = (*tokens, 2 * int(width)) if width != T else None
        alike = shapes in ([(*tokens, width)] * 2, [(*tokens, width)], [halves])
        takes = self.vjp_inputs == (*self.inputs, f"~{self.outputs[0]}")
        returns = self.vjp_outputs == self.activations and not any(self.vjp_same)
        return alike and takes and returns
