"""The memory that glibc's heap holds beyond what is in use, on a CPU.

glibc reuses freed memory for requests of any size, so most of a step's memory is reused. The rest,
holes between blocks in use, is modelled by a few shares of the memory in use. These are the values
of `runtime.machine.machine.Heap`, which `ondevice bench machine` fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.machine.heap import LARGE_VALUE_BYTES, LONG_VALUE_BYTES, MOST_HEAP_BLOCK_BYTES
from runtime.machine.machine import Heap


@dataclass(frozen=True)
class HeapUse:
    """The bytes in use while a block runs.

    Of the whole, `tile_bytes` are the current tile of weights, `chunk_bytes` the head's tile and
    `logits_bytes` the logits of a chunk of the vocabulary. `value_bytes` is the size of the largest
    value that may be mapped outside the heap, and `largest_logits_bytes` that of the largest logits
    of any block. `backward` is whether the method runs backward.
    """

    alive_bytes: int
    tile_bytes: int
    logits_bytes: int
    chunk_bytes: int
    value_bytes: int
    largest_logits_bytes: int
    backward: bool


def hole_bytes(heap: Heap, value_bytes: int) -> int:
    """The hole that values of `value_bytes` leave: they are large, but not mapped."""
    large = LARGE_VALUE_BYTES <= value_bytes < LONG_VALUE_BYTES
    return int(heap.share_of_large * value_bytes) if large else 0


def unused_bytes(heap: Heap, use: HeapUse) -> int:
    """Unused bytes of the heap while a block runs.

    The current tile of weights leaves no holes, and neither do logits that are too large for the
    heap and therefore mapped. If long values are mapped as well, fewer holes are left. Large values
    that are not mapped leave a hole of their own size.
    """
    mapped = use.logits_bytes > MOST_HEAP_BLOCK_BYTES
    off_heap = max(use.tile_bytes, use.chunk_bytes) if mapped else use.tile_bytes
    on_heap = max(0, use.alive_bytes - off_heap)
    share = heap.share + (heap.share_of_backward if use.backward else 0.0)
    if use.value_bytes >= LONG_VALUE_BYTES:
        share = heap.share_beside_mapped
    largest = 0 if mapped else use.largest_logits_bytes
    shares = share * on_heap + heap.share_of_logits * largest
    return int(heap.flat_bytes + shares) + hole_bytes(heap, use.value_bytes)
