"""What the C library's heap keeps beyond what is alive, on a CPU.

glibc serves freed memory again at any size, so most of a step's memory is reused; what lies between
the blocks in use is a few shares of what is alive (`runtime.system.machine.Heap`), which
`ondevice bench machine` measures. LOG.md has what else was tried.
"""

from __future__ import annotations

from runtime.planner.peak import PeakModel
from runtime.system.heap import LONG_VALUE_BYTES, MOST_HEAP_BLOCK_BYTES
from runtime.system.machine import Heap


def unused_bytes(heap: Heap, model: PeakModel, alive_bytes: int, index: int) -> int:
    """What the heap keeps while a block runs with so many bytes alive, adapters included.

    The current tile of weights, which is one block, leaves no holes; nor do logits too large for
    the heap, which are mapped. Where long values are mapped, too, less is left between the others.
    """
    tile, logits, chunk = model.off_heap(index)
    mapped = logits > MOST_HEAP_BLOCK_BYTES
    on_heap = max(0, alive_bytes - (max(tile, chunk) if mapped else tile))
    long_values = model.mapped_value >= LONG_VALUE_BYTES
    share = heap.share_beside_mapped if long_values else heap.share
    largest = 0 if mapped else model.largest_logits_bytes
    return int(heap.flat_bytes + share * on_heap + heap.share_of_logits * largest)
