"""Elementwise graphs: what lies between matrix products, serialized by MLX's export.

Norms, rotary embeddings, activations and residuals: one graph forward and one for its vjp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from ondevice.operations.base import Execution, Operation, Tables, Visit, require
from ondevice.operations.gated import Gated
from ondevice.operations.values import F32, Shape, T, is_parameter, shape_at, token_tile_unit

Activation = Literal["", "silu", "gelu_tanh"]  # MLX's silu and gelu_approx


def graph_key(graph: str, direction: str, tokens: int) -> str:
    """The key of a serialized function: `direction` is "forward" or "vjp"."""
    return f"{graph}.{direction}.{tokens}"


class Elementwise(Operation, frozen=True):
    """A serialized function of `inputs`, and its vjp.

    The vjp takes `vjp_inputs` (cotangents are `~name`) and returns the gradients of `vjp_outputs`.
    `vjp_same` is for each of these the cotangent whose array it is, or the earlier value whose
    gradient it is, or "". `tokenwise` says that every token is treated alike: a graph of a tile
    of tokens serves any number of them; `gated` names f where the graph is
    f(first input) * second, which a CPU computes in place of running it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: str
    vjp_inputs: tuple[str, ...] = ()
    vjp_outputs: tuple[str, ...] = ()
    vjp_same: tuple[str, ...] = ()
    tokenwise: bool = False
    gated: Activation = ""

    takes_parameters: ClassVar[bool] = True
    cheap: ClassVar[bool] = True

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[str, ...]:
        return self.outputs

    def tile_unit(self, bucket: int) -> int:
        return self.graph_tokens(bucket)

    def graph_tokens(self, bucket: int) -> int:
        """For how many tokens the graphs are made that serve a sequence bucket.

        Where tokens are treated alike, graphs of a tile of tokens serve any multiple of it.
        """
        return token_tile_unit(bucket) if self.tokenwise else bucket

    def on_device(self, device: str) -> Operation:
        """On a CPU a kernel computes gated activations: it needs less memory and time."""
        if self.gated and device == "cpu":
            return Gated(self.inputs[:2], self.outputs[:1], self.gated)  # type: ignore[arg-type]
        return self

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

    def working_bytes(self, visit: Visit, execution: Execution) -> int:
        """A graph's own values and results that nobody wants; run by tiles, all results."""
        tokens = self.graph_tokens(execution.bucket)
        direction = "vjp" if visit.backward else "forward"
        graph = execution.tables.graphs[graph_key(self.graph, direction, tokens)]
        made = self.vjp_outputs if visit.backward else self.outputs
        same = self.vjp_same if visit.backward else ("",) * len(made)
        held = {one or name for name, one in zip(made, same, strict=True) if name in visit.wanted}
        results = sum(
            math.prod(shape) * F32
            for name, one, shape in zip(made, same, graph.outputs, strict=True)
            if not one and (tokens < visit.tokens or name not in held)
        )
        return graph.workspace_bytes + results

    def check(
        self,
        where: str,
        values: Mapping[str, Shape],
        parameters: Mapping[str, tuple[int, ...]],
        tables: Tables,
    ) -> None:
        where = f"{where}: elementwise graph {self.graph}"
        distinct = len(set(self.inputs)) == len(self.inputs)
        require(distinct and bool(self.outputs), f"{where}: its inputs or outputs")
        for name in self.vjp_inputs:
            expected = self.outputs if name.startswith("~") else self.inputs
            require(name.removeprefix("~") in expected, f"{where}: its vjp wants {name}")
        activations = set(self.activations)
        returned = (len(self.vjp_outputs), set(self.vjp_outputs))
        require(returned == (len(activations), activations), f"{where}: vjp: {self.vjp_outputs}")
        self._check_same(where, values)
        if self.tokenwise:
            for name in (*activations, *self.outputs):
                require(values[name].count(T) == 1, f"{where}: {name} has not one axis of tokens")
        # whether the graph computes it is not known here, as of all that graphs compute
        good = not self.gated or self.may_be_gated(values)
        require(good, f"{where}: {self.gated} of {self.inputs}, {self.vjp_inputs}")
        self._check_graphs(where, values, parameters, tables)

    def _check_graphs(
        self,
        where: str,
        values: Mapping[str, Shape],
        parameters: Mapping[str, tuple[int, ...]],
        tables: Tables,
    ) -> None:
        """There is a graph of the right signature for every sequence bucket."""

        def shapes(names: Sequence[str], tokens: int) -> tuple[tuple[int, ...], ...]:
            return tuple(
                parameters[name[1:]]
                if is_parameter(name)
                else shape_at(values[name.removeprefix("~")], tokens)
                for name in names
            )

        for bucket in tables.buckets:
            tokens = self.graph_tokens(bucket)
            for direction, inputs, outputs in (
                ("forward", self.inputs, self.outputs),
                ("vjp", self.vjp_inputs, self.vjp_outputs),
            ):
                graph = tables.graphs.get(graph_key(self.graph, direction, tokens))
                require(graph is not None, f"{where}: no {direction} graph for bucket {bucket}")
                assert graph is not None
                for names, found in ((inputs, graph.inputs), (outputs, graph.outputs)):
                    require(found == shapes(names, tokens), f"{where}: signature {found}")

    def _check_same(self, where: str, values: Mapping[str, Shape]) -> None:
        """A gradient is a cotangent that the vjp takes, an earlier gradient, or its own array.

        Whether the graph does as it says is not known here, as of all that graphs compute.
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
        """Whether it makes one value of two of its shape, and its vjp two of all three."""
        names = (*self.inputs, *self.outputs)
        if (len(self.inputs), len(self.outputs)) != (2, 1) or not set(names) <= set(values):
            return False
        alike = len({values[name] for name in names}) == 1
        takes = self.vjp_inputs == (*self.inputs, f"~{self.outputs[0]}")
        returns = self.vjp_outputs == self.inputs and not any(self.vjp_same)
        return alike and takes and returns and self.tokenwise
