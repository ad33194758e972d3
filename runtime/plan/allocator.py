"""The bytes that the allocator holds at the peak: those in use, and the unused ones beyond that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.arrays.stored import PAGE
from runtime.machine.glibc import HeapUse, unused_bytes
from runtime.machine.machine import Machine
from runtime.operations.linear import SPLIT_BYTES
from runtime.plan.block_peaks import BlockPeak, PeakModel

# MLX's own cache reuses buffers of nearly equal sizes only; it is given no more than this
CACHE_PER_LIVE = 1.5
# times as much of what is kept is unused where an operation's values leave holes besides: measured
BESIDE_WIDE = 2
# On a Mac's GPU: arrays that exist at once, each of which ends in the middle of a page; where an
# operation is one evaluation they are adapters and gradients: values are counted in pages
ARRAYS = 128


@dataclass(frozen=True)
class Held:
    """Bytes in use without adapters and gradients, unused in the heap, and in MLX's cache."""

    live_bytes: int
    slack_bytes: int
    cache_bytes: int


def held_by_allocator(
    machine: Machine, model: PeakModel, blocks: tuple[BlockPeak, ...], cache_bytes: int
) -> Held:
    """The allocator's bytes while these blocks run, with an MLX cache of at most `cache_bytes`.

    While the embedding or the head runs, no layer's adapters and gradients are in memory, which
    leaves more room for other values.
    """
    heap = machine.heap if machine.allocator == "glibc" else None
    ends = (0, len(blocks) - 1)
    lives = [(model.adapters.perturbing, 0)]
    for index in (lowered.alike for lowered in model.lowered.distinct):
        block = blocks[index]
        spared = model.adapters.only_in_layers if index in ends else 0
        lives.append((max(block.forward_bytes, block.backward_bytes) - spared, index))
    peaks = []
    for live, index in lives:
        use = heap_use(model, live + model.adapters.only_in_layers, index)
        peaks.append((max(0, live), 0 if heap is None else unused_bytes(heap, use)))
    live, slack = max(peaks, key=sum)
    if machine.allocator == "metal":
        slack += ARRAYS * PAGE + (0 if model.execution.one_evaluation else SPLIT_BYTES)
    cache = 0 if heap is not None else min(cache_bytes, int(CACHE_PER_LIVE * live))
    return Held(live, slack, cache)


def heap_use(model: PeakModel, alive_bytes: int, index: int) -> HeapUse:
    """How the heap holds `alive_bytes` while block `index` runs."""
    tile, logits, chunk = model.off_heap(index)
    return HeapUse(
        alive_bytes,
        tile,
        logits,
        chunk,
        model.mapped_value,
        model.largest_logits_bytes,
        model.demand.backward,
        model.hole_bytes,
        model.wider_bytes,
        model.beside_forward_bytes,
        model.execution.tiled,
    )


def with_kept(machine: Machine, model: PeakModel, live_bytes: int, kept: Sequence[int]) -> int:
    """Bytes of additional kept activations, with what the allocator holds beyond them.

    Without slices of MLPs, which leave holes of other sizes, that is one value at most. `kept` are
    the layers that keep them, see `way_of`.
    """
    share = machine.heap.share_of_kept if machine.allocator == "glibc" else 0.0
    unused = int(live_bytes * share)
    if not model.mapped_value:
        return live_bytes + min(unused, model.largest_whole_value)
    if share and (hole := model.hole_beside_kept(kept)):
        unused = BESIDE_WIDE * unused + hole
    return live_bytes + unused
