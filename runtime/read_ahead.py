"""A thread that reads the next block while the current one computes.

It brings pages into the system's file cache and keeps none of them: its only memory is one buffer
of `BUFFER_BYTES`, which the plan counts. A block is fetched up to `AHEAD_BYTES`; of a head that
streams a large vocabulary only the beginning.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from ondevice.errors import StorageError

BUFFER_BYTES = 1 << 20
AHEAD_BYTES = 64 << 20


class ReadAhead:
    """Reads ranges of one file, one request at a time, in the background."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._problem: OSError | None = None
        threading.Thread(target=self._serve, name="read-ahead", daemon=True).start()

    def request(self, start: int, stop: int) -> None:
        """Ask for bytes start:stop; returns at once.

        Raises:
            StorageError: an earlier request could not be read.
        """
        if self._problem is not None:
            raise StorageError(f"{self._path} cannot be read: {self._problem}")
        self._requests.put((start, min(stop, start + AHEAD_BYTES)))

    def _serve(self) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        try:
            fd = os.open(self._path, os.O_RDONLY)
            while True:
                start, stop = self._requests.get()
                while start < stop:
                    count = os.preadv(fd, [buffer[: stop - start]], start)
                    if count == 0:
                        raise OSError("the file ended early")
                    start += count
        except OSError as problem:
            self._problem = problem
