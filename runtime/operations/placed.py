"""The operation Placed: an elementwise graph that takes the position of its first token.

The lowering replaces an `Elementwise` operation whose results depend on positions by it for
decoding, where a sequence goes on.
"""

from __future__ import annotations

import math
from typing import ClassVar

from runtime.operations.base import Call, Execution, Function
from runtime.operations.values import F32, graph_key


class Placed(Function, frozen=True):
    """The serialized function `graph` of `inputs` and of the position; never in a bundle."""

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
