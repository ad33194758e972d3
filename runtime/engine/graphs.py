"""Running glue graphs: what lies between a block's matrix products, forward and vjp, at one bucket.

A graph that treats every token alike (`Step.tokenwise`) runs a tile of tokens at a time, so that
its intermediates are small: they stay in the processor's cache and hardly count for the peak.
Where a graph is a gated activation (`Step.gated`), a CPU runs a kernel in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from ondevice.bundle.manifest import BlockType, Step, graph_key, graph_length, shape_at, token_axis
from ondevice.bundle.store import Bundle
from ondevice.errors import BundleError
from runtime.engine.kernels.gated import gated, gated_vjp
from runtime.engine.kernels.in_place import on_gpu, put

Graphs = dict[str, Callable[..., Any]]
"""Opened graphs by key."""


@dataclass
class GraphRunner:
    """The graphs of a bundle at one bucket, opened when first asked for, and shared among buckets."""

    bundle: Bundle
    bucket: int
    graphs: Graphs = field(default_factory=dict)

    def run(
        self,
        block_type: BlockType,
        step: Step,
        direction: str,
        arguments: Sequence[mx.array],
        wanted: Sequence[str],
        tokens: int,
    ) -> dict[str, mx.array]:
        """The results named `wanted` of `direction` ("forward" or "vjp"); of whole graphs lazily.

        `tokens` is how many the arguments have: the bucket's, or those of a tile of them.
        """
        if step.gated and not on_gpu():
            return _gated(step, direction, arguments, wanted)
        names = step.inputs if direction == "forward" else step.vjp_inputs
        made = step.outputs if direction == "forward" else step.vjp_outputs
        length = graph_length(step, self.bucket)
        if length == tokens:
            results = dict(zip(made, self._call(step, direction, arguments), strict=True))
            return {name: results[name] for name in wanted}
        given = dict(zip(names, arguments, strict=True))
        same = dict(zip(made, step.vjp_same, strict=True)) if direction == "vjp" else {}
        holder = {name: same.get(name) or name for name in wanted}
        own = dict.fromkeys(one for one in holder.values() if not one.startswith("~"))
        found = {name: mx.zeros(shape_at(block_type.values[name], tokens)) for name in own}
        mx.eval(found)
        for start in range(0, tokens, length):
            tile = slice(start, start + length)
            sliced = [
                array if name.startswith("@") else array[_along(block_type, name, tile)]
                for name, array in given.items()
            ]
            results = dict(zip(made, self._call(step, direction, sliced), strict=True))
            del sliced
            mx.eval([results[name] for name in own])
            for name in own:
                put(found[name], _along(block_type, name, tile), results[name])
            del results
        return {name: found[one] if one in own else given[one] for name, one in holder.items()}

    def _call(
        self, step: Step, direction: str, arguments: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        """A graph's results, lazy; a file that is not what the manifest says is refused."""
        key = graph_key(step.graph, direction, graph_length(step, self.bucket))
        graph = self.bundle.manifest.graphs[key]
        function = self._graph(key)
        try:
            results = tuple(function(*arguments))
        except (RuntimeError, ValueError) as problem:
            raise BundleError(f"{graph.file} does not take its inputs: {problem}") from None
        found = tuple(tuple(result.shape) for result in results)
        if found != graph.outputs or any(result.dtype != mx.float32 for result in results):
            raise BundleError(f"{graph.file} returns {found}, the manifest says {graph.outputs}")
        return results

    def _graph(self, key: str) -> Callable[..., Any]:
        if key not in self.graphs:
            graph = self.bundle.manifest.graphs[key]
            try:
                self.graphs[key] = cast(
                    Callable[..., Any], mx.import_function(str(self.bundle.path / graph.file))
                )
            except RuntimeError as problem:
                raise BundleError(f"{graph.file} cannot be loaded: {problem}") from None
        return self.graphs[key]


def _gated(
    step: Step, direction: str, arguments: Sequence[mx.array], wanted: Sequence[str]
) -> dict[str, mx.array]:
    """The same results by a kernel, over any number of tokens."""
    if direction == "forward":
        return {step.outputs[0]: gated(step.gated, *arguments)}
    results = dict(zip(step.vjp_outputs, gated_vjp(step.gated, *arguments), strict=True))
    return {name: results[name] for name in wanted}


def _along(block_type: BlockType, name: str, tile: slice) -> tuple[slice, ...]:
    axis = token_axis(block_type.values[name.removeprefix("~")])
    return (*(slice(None),) * axis, tile)
