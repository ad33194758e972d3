"""The bytes of adapters and their gradients while a block runs, for one training method."""

from __future__ import annotations

import math
from functools import cached_property

from runtime.arrays.stored import Block
from runtime.bundle.manifest import Manifest
from runtime.operations.sliced_mlp import MOST_TOKENS
from runtime.operations.values import F32
from runtime.plan.demand import Demand
from runtime.plan.lower import LoweredBlock, LoweredModel


class AdapterBytes:
    """In float32: of a layer's adapters, and of those of the embedding and the head."""

    def __init__(self, manifest: Manifest, lowered: LoweredModel, demand: Demand) -> None:
        self.manifest, self.lowered, self.demand = manifest, lowered, demand
        self.execution = lowered.execution

    @cached_property
    def all(self) -> int:
        """Bytes of the float32 adapters of all blocks."""
        own = {lowered.alike: self.of(lowered.block) for lowered in self.lowered.distinct}
        return sum(own[lowered.alike] for lowered in self.lowered.blocks)

    @cached_property
    def current(self) -> int:
        """Bytes of the adapters in memory while a layer runs."""
        if self.demand.all_adapters:
            return self.all
        return self._most * self.demand.adapter_copies

    def at_end(self, lowered: LoweredBlock, lanes: int) -> int:
        """Bytes of adapters and gradients while the embedding or the head runs with an adapter.

        The head's products with it are of a chunk of the vocabulary. A gradient is held twice where
        it is added to that of earlier micro-batches, and three times where it is stored; that of a
        tied head just waits.
        """
        owner = self.manifest.owner(lowered.block)
        own = self.of(owner)
        if not own or lowered.block in self.manifest.layers:
            return 0
        demand, execution = self.demand, self.execution
        nbytes = 0 if demand.all_adapters else own * demand.adapter_copies
        if demand.backward:
            times = 3 if demand.stores_gradients else 2 if demand.holds_gradients else 1
            nbytes += own * (times if owner == lowered.block else 1) - self.waiting
        by_token = execution.bucket * execution.rank * F32
        nbytes += 6 * lanes * by_token
        if lowered.head is not None:
            logits = lowered.head.streamed(execution)[0]
            nbytes += 2 * execution.chunk_rows * execution.rank * F32
            if execution.one_evaluation and demand.backward:
                nbytes += 4 * lanes * logits + 2 * own
        return nbytes

    @cached_property
    def gradients(self) -> int:
        """Bytes of gradients: of all layers if micro-batches accumulate, else of the largest layer.

        A further row adds a layer's gradients while they are summed, and so do further tokens of an
        MLP. What a worker has sent of a layer, and the sum over all workers, are there while the
        next layer runs.
        """
        if not self.demand.backward:
            return 0
        sliced = self.lowered.slice_columns > 0 and self.lowered.bucket > MOST_TOKENS
        fresh = self._most if self.demand.rows > 1 or sliced else 0
        together = self.execution.one_evaluation and self.demand.rows > 1
        if together or (self.manifest.device == "gpu" and self._held):
            fresh += self._most  # their sums are one evaluation
        summed = 2 * self._most if self.demand.sums_gradients else 0
        return self._held + self._most + fresh + summed

    @property
    def perturbing(self) -> int:
        """Extra bytes while perturbed copies of a block's adapters are made, one of them new."""
        copies, outside = max(0, self.demand.scratch_copies - 1), self.outside
        held = 0 if self.demand.all_adapters else outside * self.demand.adapter_copies
        ends = held + copies * outside - self.only_in_layers
        return max(copies * self._most, ends if outside else 0)

    @cached_property
    def outside(self) -> int:
        """The most bytes of the adapter of the embedding or the head."""
        return max(self.of(self.manifest.blocks[at]) for at in (0, -1))

    @cached_property
    def waiting(self) -> int:
        """Bytes of the gradient of a tied head's adapter, which waits for the embedding's."""
        first, last = self.manifest.blocks[0], self.manifest.blocks[-1]
        waits = self.demand.backward and self.manifest.owner(last) == first
        return self.of(first) if waits else 0

    @cached_property
    def only_in_layers(self) -> int:
        """Bytes of adapters and gradients that are free while the embedding or the head runs."""
        if self.demand.all_adapters:
            return 0
        return self.current + self.gradients - self._held

    @property
    def _held(self) -> int:
        """Bytes of gradients that wait for a step's last micro-batch, or for the embedding."""
        held = self.all if self.demand.holds_gradients else 0
        return held + self.waiting

    @cached_property
    def _most(self) -> int:
        return max(self.of(lowered.block) for lowered in self.lowered.distinct_layers)

    def of(self, block: Block) -> int:
        """Bytes of the float32 adapters of one block."""
        shapes = self.manifest.adapter_shapes(block)
        return sum(math.prod(shape) * F32 for shape in shapes.values())
