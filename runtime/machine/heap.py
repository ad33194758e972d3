"""Settings of the C library's heap, which holds MLX's buffers on a CPU, and releasing free memory.

Nothing is done on macOS, or if the C library is not glibc.
"""

from __future__ import annotations

import ctypes
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MOST_HEAP_BLOCK_BYTES = 32 << 20  # the largest block that glibc allows on its heap
NEVER_TRIM_BYTES = (1 << 31) - 1
MAPPED_BLOCK_BYTES = 256 << 10  # larger blocks are mapped if the heap is not kept
LONG_VALUE_BYTES = 6_000_000  # larger values of all tokens are mapped
LARGE_VALUE_BYTES = 2_000_000  # larger values do not fit the holes that tiles of tokens leave


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
    most = min(value_bytes // 2, MOST_HEAP_BLOCK_BYTES) if long else MOST_HEAP_BLOCK_BYTES
    libc.mallopt(M_MMAP_THRESHOLD, most)
    libc.mallopt(M_TRIM_THRESHOLD, value_bytes // 2 if long else NEVER_TRIM_BYTES)


def trim_heap() -> None:
    """Give the heap's free pages back to the system; they become resident again on use."""
    libc = _libraries()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
