"""A thread that reads or writes while more is computed; it works in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

QUEUED = 2  # pieces of trained weights that wait to be written

Work = Callable[[], None]


class Background:
    """A thread that does one piece of work after another, as long as this object lives.

    At most `most` pieces wait, or any number of them. `errors` is around the error of a piece where
    it is raised again; after it nothing more is done.
    """

    def __init__(
        self, name: str, errors: Callable[[], AbstractContextManager[None]], most: int = 0
    ) -> None:
        self._errors = errors
        self._queue: queue.Queue[Work | None] = queue.Queue(most)
        self._problems: list[Exception] = []
        arguments = (self._queue, self._problems)  # not self: the thread would keep it
        threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def put(self, work: Work) -> None:
        """Do this after all earlier work; waits while `most` pieces do. Raises an earlier error."""
        self._check()
        self._queue.put(work)

    def drain(self) -> None:
        """Wait until all is done. Raises an earlier error."""
        self._queue.join()
        self._check()

    def _check(self) -> None:
        if self._problems:
            with self._errors():
                raise self._problems[0]


def _serve(works: queue.Queue[Work | None], problems: list[Exception]) -> None:
    while (work := works.get()) is not None:
        try:
            if not problems:
                work()
        except Exception as problem:  # raised again where it is seen
            problems.append(problem)
        finally:
            del work
            works.task_done()
