"""The C library's heap, which serves MLX's buffers on a CPU: what it keeps, and giving it back.

On macOS, and where the C library is not glibc, nothing is done.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MOST_HEAP_BLOCK_BYTES = 32 << 20  # the largest that glibc lets its heap serve
NEVER_TRIM_BYTES = (1 << 31) - 1
MAPPED_BLOCK_BYTES = 256 << 10  # from here on, where the heap is not kept
LONG_VALUE_BYTES = 6_000_000  # from here on a value of all tokens is mapped


def tune_heap(keep: bool) -> None:
    """Serve large blocks from one heap that is kept, or map each afresh.

    Fresh pages cost more than the arithmetic on them. The heap reuses freed memory at any size,
    where MLX's own cache needs nearly equal sizes: at half the footprint half the time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_MMAP_THRESHOLD, MOST_HEAP_BLOCK_BYTES if keep else MAPPED_BLOCK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES if keep else MAPPED_BLOCK_BYTES)
    libc.mallopt(M_ARENA_MAX, 1 if keep else 2)


def place_values(value_bytes: int) -> None:
    """Serve values of all tokens, of so many bytes, from the kept heap, or map long ones afresh.

    A few long values come and go among thousands of tiles, which leave holes that none of them
    fits. glibc maps a block only where neither a hole nor the heap's end has room for it, so the
    end is kept short for them, too.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    long = value_bytes >= LONG_VALUE_BYTES
    most = min(value_bytes // 2, MOST_HEAP_BLOCK_BYTES) if long else MOST_HEAP_BLOCK_BYTES
    libc.mallopt(M_MMAP_THRESHOLD, most)
    libc.mallopt(M_TRIM_THRESHOLD, value_bytes // 2 if long else NEVER_TRIM_BYTES)


def trim_heap() -> None:
    """Give the heap's free pages back to the system; they fault in again when they are used."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
