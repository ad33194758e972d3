"""A file's pages in the system's cache: dropping them, and measuring the cached share.

Dropping is a request (POSIX_FADV_DONTNEED) that does not apply to pages in use, so the share that
stays is measured (mincore). A hypervisor's cache below this system is out of reach.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

from runtime.core.errors import OnDeviceError
from runtime.core.files import flush


def drop(path: Path) -> None:
    """Ask the system to forget a file's pages.

    Raises:
        OnDeviceError: the system cannot.
    """
    if sys.platform == "darwin":
        raise OnDeviceError("macOS cannot drop a file from its cache (it has no posix_fadvise)")
    fd = os.open(path, os.O_RDONLY)
    try:
        flush(fd)  # pages that are not on the disk yet are kept
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
