"""The memory that glibc's heap holds beyond what is in use, on a CPU.

glibc reuses freed memory for requests of any size, so most of a step's memory is reused. The rest,
holes between blocks in use, is modelled by a few shares of the memory in use. These are the values
of `runtime.system.machine.Heap`, which `ondevice bench machine` fits.
"""

from __future__ import annotations

from runtime.planner.peak import PeakModel
from runtime.system.heap import LARGE_VALUE_BYTES, LONG_VALUE_BYTES, MOST_HEAP_BLOCK_BYTES
from runtime.system.machine import Heap


def hole_bytes(heap: Heap, value_bytes: int) -> int:
    """The hole that values of `value_bytes` leave: they are large, but not mapped."""
    large = LARGE_VALUE_BYTES <= value_bytes < LONG_VALUE_BYTES
    return int(heap.share_of_large * value_bytes) if large else 0


def unused_bytes(heap: Heap, model: PeakModel, alive_bytes: int, index: int) -> int:
    """Unused bytes of the heap while block `index` runs with `alive_bytes` in use.

    The current tile of weights leaves no holes, and neither do logits that are too large for the
    heap and therefore mapped. If long values are mapped as well, fewer holes are left. Large values
    that are not mapped leave a hole of their own size.
    """
    tile, logits, chunk = model.off_heap(index)
    mapped = logits > MOST_HEAP_BLOCK_BYTES
    on_heap = max(0, alive_bytes - (max(tile, chunk) if mapped else tile))
    share = heap.share + (heap.share_of_backward if model.demand.backward else 0.0)
    if model.mapped_value >= LONG_VALUE_BYTES:
        share = heap.share_beside_mapped
    largest = 0 if mapped else model.largest_logits_bytes
    shares = share * on_heap + heap.share_of_logits * largest
    return int(heap.flat_bytes + shares) + hole_bytes(heap, model.mapped_value)
