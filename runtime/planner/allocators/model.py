"""What the allocator holds at the worst moment: what is alive, and what it keeps besides."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.planner.allocators.glibc import unused_bytes
from runtime.planner.peak import BlockPeak, PeakModel
from runtime.system.machine import Machine

# MLX's own cache reuses buffers of nearly equal sizes only; more than this is never kept
CACHE_PER_LIVE = 1.5


@dataclass(frozen=True)
class Held:
    """Alive, besides adapters and gradients; unused between blocks of a heap; and kept by MLX."""

    live_bytes: int
    slack_bytes: int
    cache_bytes: int


def held_by_allocator(
    machine: Machine, model: PeakModel, blocks: tuple[BlockPeak, ...], cache_bytes: int
) -> Held:
    """What is held while blocks of these peaks run; MLX's cache is limited to `cache_bytes`.

    While the embedding and the head run no layer's adapters and gradients are in memory: so much
    more of theirs fits.
    """
    heap = machine.heap if machine.allocator == "glibc" else None
    found = [(model.perturbing_bytes, 0)]
    for index, block in enumerate(blocks):
        live = max(block.forward_bytes, block.backward_bytes)
        besides, spared = model.only_in_layers, 0
        if index in (0, len(blocks) - 1):
            besides, spared = spared, besides
        slack = 0 if heap is None else unused_bytes(heap, model, live + besides, index)
        found.append((max(0, live - spared), slack))
    live, slack = max(found, key=sum)
    cache = 0 if heap is not None else min(cache_bytes, int(CACHE_PER_LIVE * live))
    return Held(live, slack, cache)


def with_kept(machine: Machine, live_bytes: int) -> int:
    """So many bytes more of kept activations, with what the allocator keeps on top of them."""
    share = machine.heap.share_of_kept if machine.allocator == "glibc" else 0.0
    return int(live_bytes * (1 + share))


def with_materialized(machine: Machine, weight_bytes: int) -> int:
    """So many bytes of weights that stay dequantized, with what the allocator keeps besides."""
    heap = machine.heap
    if machine.allocator != "glibc" or not weight_bytes:
        return weight_bytes
    return (
        int(weight_bytes * (1 + heap.share_of_materialized)) + heap.flat_beside_materialized_bytes
    )
