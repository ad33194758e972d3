"""Memory that tests take and give back, and nothing beside it."""

from __future__ import annotations

import mmap


def touched(size_bytes: int) -> mmap.mmap:
    """Anonymous memory, every page of it written: no heap has a part in it."""
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        block[page] = 1
    return block
