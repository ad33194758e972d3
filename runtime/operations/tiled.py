"""The operation Tiled: runs a sequence of other operations on one tile of tokens at a time.

The lowering replaces an MLP by it. The values inside an MLP are several times as wide as the hidden
states, and with Tiled they exist for one tile of tokens only, forward and backward (like the
sequence tiling of ALST, arXiv 2506.13996). The weights are read and dequantized for each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from runtime.operations.base import Call, Execution, Function, Operation


class Tiled(Function, frozen=True):
    """The operations `inside` that lead from one input to one output; never in a bundle."""

    inputs: tuple[str]
    outputs: tuple[str]
    inside: tuple[Operation, ...]

    runs_once_per_tile: ClassVar[bool] = True

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(name for operation in self.inside for name in operation.adaptable)

    @property
    def inner_values(self) -> tuple[str, ...]:
        """The values that exist for a tile of tokens only."""
        return tuple(
            n for operation in self.inside for n in operation.results if n not in self.outputs
        )

    def tile_unit(self, bucket: int) -> int:
        return max(operation.tile_unit(bucket) for operation in self.inside)

    def matrices(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(name for operation in self.inside for name in operation.matrices(tensor))

    def vectors(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(name for operation in self.inside for name in operation.vectors(tensor))

    def multiplied(self, tensor: Callable[[str], str]) -> tuple[str, ...]:
        return tuple(name for operation in self.inside for name in operation.multiplied(tensor))

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        return self.outputs if self.learns(adapted) else ()

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(self.inputs)  # from which a tile is recomputed

    def graph_keys(self, bucket: int, backward: bool) -> tuple[str, ...]:
        return tuple(
            key for operation in self.inside for key in operation.graph_keys(bucket, backward)
        )

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """0: the planner adds up what the instructions inside it need."""
        return 0
