"""A thread that reads the next block while the current one computes.

It brings pages into the system's file cache. Its only memory is one buffer of `BUFFER_BYTES`, which
the plan counts. It reads at most `AHEAD_BYTES` of a block, so of a large head only the beginning.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import weakref
from pathlib import Path

from runtime.core.errors import BundleError

BUFFER_BYTES = 1 << 20
AHEAD_BYTES = 64 << 20


Requests = queue.SimpleQueue[tuple[int, int] | None]  # None ends the thread


class ReadAhead:
    """Reads ranges of one file, one request at a time, in the background, as long as it lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: Requests = queue.SimpleQueue()
        self._problems: list[Exception] = []
        arguments = (path, self._requests, self._problems)  # not self: the thread would keep it
        threading.Thread(target=_serve, args=arguments, name="read-ahead", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def request(self, start: int, stop: int) -> None:
        """Ask for bytes start:stop; returns at once.

        Raises:
            BundleError: an earlier request could not be read. A failure of the last request is
                found when its bytes are used.
        """
        if self._problems:
            raise BundleError(f"{self._path} cannot be read: {self._problems[0]}")
        self._requests.put((start, min(stop, start + AHEAD_BYTES)))


def _serve(path: Path, requests: Requests, problems: list[Exception]) -> None:
    try:
        # mapped, not of the heap: only as much of it as is filled is ever resident
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=private))
        with path.open("rb", buffering=0) as file:
            while (asked := requests.get()) is not None:
                start, stop = asked
                while start < stop:
                    count = os.preadv(file.fileno(), [buffer[: stop - start]], start)
                    if count == 0:
                        raise OSError("the file ended early")
                    start += count
    except Exception as problem:  # the next request raises it where it is seen
        problems.append(problem)
