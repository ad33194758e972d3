"""A thread that writes results while more are computed; it works in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from runtime.core.files import storage_errors

QUEUED = 2  # pieces of work that wait to be done

Work = Callable[[], None]


class Writer:
    """A thread that does one piece of work after another; at most `QUEUED` wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.Queue[Work | None] = queue.Queue(QUEUED)
        self._problems: list[Exception] = []
        arguments = (self._queue, self._problems)  # not self: the thread would keep it
        threading.Thread(target=_serve, args=arguments, name="write-back", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def put(self, work: Work) -> None:
        """Do this after all earlier work; waits while `QUEUED` pieces do.

        Raises:
            StorageError: an earlier piece failed.
        """
        self._check()
        self._queue.put(work)

    def drain(self) -> None:
        """Wait until all is done.

        Raises:
            StorageError: a piece failed.
        """
        self._queue.join()
        self._check()

    def _check(self) -> None:
        if self._problems:
            with storage_errors(self._path):
                raise self._problems[0]


def _serve(works: queue.Queue[Work | None], problems: list[Exception]) -> None:
    while (work := works.get()) is not None:
        try:
            if not problems:  # after a failure nothing more is written
                work()
        except Exception as problem:  # raised again where it is seen
            problems.append(problem)
        finally:
            del work
            works.task_done()
