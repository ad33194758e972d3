"""What the allocator holds at the worst moment: what is alive, and what it keeps besides."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.planner.allocators.glibc import NONE, slack_of
from runtime.planner.peak import BlockPeak, PeakModel
from runtime.system.heap import MOST_HEAP_BLOCK_BYTES
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
    """What is held while blocks of these peaks run; MLX's cache is limited to `cache_bytes`."""
    if machine.allocator == "mlx":
        live, _ = _worst(model, blocks, NONE.share)
        return Held(live, 0, min(cache_bytes, int(CACHE_PER_LIVE * live)))
    slack = slack_of(model)
    live, unused = _worst(model, blocks, slack.share)
    return Held(live, unused + min(live // 4, slack.flat_bytes), 0)


def _worst(model: PeakModel, blocks: tuple[BlockPeak, ...], share: float) -> tuple[int, int]:
    """What is alive at the worst moment, and the heap's share then.

    While the embedding and the head run no layer's adapters and gradients are in memory: so much
    more of theirs fits.
    """
    found = [(model.perturbing_bytes, 0)]
    for index, block in enumerate(blocks):
        live = max(block.forward_bytes, block.backward_bytes)
        besides, spared = model.only_in_layers, 0
        if index in (0, len(blocks) - 1):
            besides, spared = spared, besides
        slack = int(share * max(0, live + besides - _off_heap(model, index)))
        found.append((max(0, live - spared), slack))
    return max(found, key=sum)


def _off_heap(model: PeakModel, index: int) -> int:
    """What of a block's peak no heap serves: the current tile, and logits too large for a heap."""
    tile, logits, chunk = model.off_heap(index)
    return tile if logits <= MOST_HEAP_BLOCK_BYTES else max(tile, chunk)
