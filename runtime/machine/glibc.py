"""glibc's heap, which holds MLX's buffers on a CPU: its settings, and a model of its unused bytes.

The settings change nothing on macOS, or if the C library is not glibc.

glibc reuses freed memory for requests of any size, so most of a step's memory is reused. The rest,
holes between blocks in use, is modelled by a few shares of the memory in use. These are the values
of `runtime.machine.machine.Heap`, which `ondevice bench machine` fits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from runtime.machine.machine import Heap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MOST_HEAP_BLOCK_BYTES = 32 << 20  # the largest block that glibc allows on its heap
NEVER_TRIM_BYTES = (1 << 31) - 1
LONG_VALUE_BYTES = 6_000_000  # larger values of all tokens are mapped
MAPPED_BLOCK_BYTES = 256 << 10  # larger blocks are mapped if the heap keeps nothing


@cache
def _libraries() -> ctypes.CDLL:
    """The libraries of this process; each new CDLL object would leave a class to be collected."""
    return ctypes.CDLL(None)


def tune_heap(keep: bool) -> None:
    """Allocate large blocks on one heap that keeps freed memory (`keep`), or map each one newly.

    New pages cost more time than the arithmetic on them. The heap reuses freed memory at any size,
    whereas MLX's own cache needs nearly equal sizes; the heap took half the memory and time.
    """
    libc = _libraries()
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_MMAP_THRESHOLD, MOST_HEAP_BLOCK_BYTES if keep else MAPPED_BLOCK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES if keep else MAPPED_BLOCK_BYTES)
    libc.mallopt(M_ARENA_MAX, 1 if keep else 2)


def place_values(value_bytes: int) -> None:
    """Keep values of `value_bytes` on the heap, or map them outside it if they are long.

    On the heap, thousands of tiles leave holes into which the few long values do not fit. glibc
    maps a block only if neither a hole nor the end of the heap has room for it, so the free end is
    kept short as well.
    """
    libc = _libraries()
    if not hasattr(libc, "mallopt"):
        return
    long = value_bytes >= LONG_VALUE_BYTES
    libc.mallopt(M_MMAP_THRESHOLD, _largest_on_heap(value_bytes))
    libc.mallopt(M_TRIM_THRESHOLD, value_bytes // 2 if long else NEVER_TRIM_BYTES)


def _largest_on_heap(value_bytes: int) -> int:
    """Bytes of the largest block on the heap where the longest value has `value_bytes`."""
    long = value_bytes >= LONG_VALUE_BYTES
    return min(value_bytes // 2, MOST_HEAP_BLOCK_BYTES) if long else MOST_HEAP_BLOCK_BYTES


def trim_heap() -> None:
    """Give the heap's free pages back to the system; they become resident again on use."""
    libc = _libraries()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@dataclass(frozen=True)
class HeapUse:
    """The bytes in use while a block runs.

    Of the whole, `tile_bytes` are the current tile of weights, `chunk_bytes` the head's tile and
    `logits_bytes` the logits of a chunk of the vocabulary. `value_bytes` is the size of the largest
    value that may be mapped outside the heap, and `largest_logits_bytes` that of the largest logits
    of any block. `backward` is whether the method runs backward. `hole_bytes` are those of tiles
    that do not fit the holes that others leave, since what lies between these varies in size.
    `wider_bytes` are those that the widest value takes more than hidden states, and
    `beside_forward_bytes` those that hidden states of forwards alone leave unused. Where nothing
    is `tiled`, compiled code lets a slice's values and logits lie where the last ones did.
    """

    alive_bytes: int
    tile_bytes: int
    logits_bytes: int
    chunk_bytes: int
    value_bytes: int
    largest_logits_bytes: int
    backward: bool
    hole_bytes: int = 0
    wider_bytes: int = 0
    beside_forward_bytes: int = 0
    tiled: bool = True


def unused_bytes(heap: Heap, use: HeapUse) -> int:
    """Unused bytes of the heap while a block runs.

    The current tile of weights leaves no holes, and neither do logits that are too large for the
    heap and therefore mapped, or into whose holes the values of forwards fit. If long values are
    mapped as well, fewer holes are left.
    """
    most = _largest_on_heap(use.value_bytes)
    mapped = use.logits_bytes > most
    off_heap = max(use.tile_bytes, use.chunk_bytes) if mapped else use.tile_bytes
    on_heap = max(0, use.alive_bytes - off_heap)
    varied = use.backward and use.tiled
    share = heap.share + (heap.share_of_backward if varied else 0.0)
    largest = 0 if use.largest_logits_bytes > most else use.largest_logits_bytes
    holes = use.hole_bytes + (heap.share_of_logits * largest if varied else 0)
    if use.value_bytes >= LONG_VALUE_BYTES:
        share = heap.share_beside_mapped
    else:
        holes += heap.share_of_wider * use.wider_bytes * (2 if use.backward else 1)
        holes += use.beside_forward_bytes
    return int(heap.flat_bytes + share * on_heap + holes)
