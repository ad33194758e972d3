"""A file's pages in the system's cache: dropped where the system can, and counted.

Dropping is a request (POSIX_FADV_DONTNEED), which pages in use withstand: what is left is counted
(mincore), never assumed. A hypervisor's cache below this system is out of reach.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from ondevice.errors import OnDeviceError


def drop(path: Path) -> None:
    """Ask the system to forget a file's pages.

    Raises:
        OnDeviceError: this system has no way to.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OnDeviceError("this system cannot drop a file from its cache (no posix_fadvise)")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # pages that are not on the disk yet are kept
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def cached_share(path: Path) -> float:
    """The share of a file's pages that are cached.

    Raises:
        OnDeviceError: the system does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        ctypes.c_void_p(pages.ctypes.data),
    )
    if libc.mincore(*arguments):
        raise OnDeviceError(
            f"mincore does not say what of {path} is cached: {os.strerror(ctypes.get_errno())}"
        )
    return float((pages & 1).mean())
