"""Reading the next block, in a thread, while the current one computes.

It brings pages into the system's file cache. Its only memory is one buffer of `BUFFER_BYTES`, which
the plan counts. It reads at most `AHEAD_BYTES` of a block, so of a large head only the beginning.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from functools import partial
from pathlib import Path

from runtime.core.files import reading_errors
from runtime.storage.background import Background

BUFFER_BYTES = 1 << 20
AHEAD_BYTES = 64 << 20


class ReadAhead:
    """Reads ranges of one file, one request at a time, in the background, as long as it lives.

    Raises:
        BundleError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        errors = partial(reading_errors, path)
        with errors():
            self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        # mapped, not of the heap: only as much of it as is filled is ever resident
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=private))
        self._thread = Background("read-ahead", errors)

    def request(self, start: int, stop: int) -> None:
        """Ask for bytes start:stop; returns at once.

        Raises:
            BundleError: an earlier request could not be read. A failure of the last request is
                found when its bytes are used.
        """
        self._thread.put(partial(self._read, start, min(stop, start + AHEAD_BYTES)))

    def _read(self, start: int, stop: int) -> None:
        while start < stop:
            count = os.preadv(self._fd, [self._buffer[: stop - start]], start)
            if count == 0:
                raise OSError(errno.EIO, "the file ended early")
            start += count
