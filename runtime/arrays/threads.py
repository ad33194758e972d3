"""Threads that run the parts of one task side by side, each on a core of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Task = Callable[[int], None]
"""Does the part of a thread, which it is given by number."""
Tasks = SimpleQueue[Task | None]  # None ends the thread
Ends = SimpleQueue[BaseException | None]


class Threads:
    """So many threads, of which the first is the caller's own. Only one caller may use them."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._tasks: list[Tasks] = [SimpleQueue() for _ in range(1, count)]
        self._ends: Ends = SimpleQueue()
        for number, tasks in enumerate(self._tasks, 1):
            given = (number, tasks, self._ends)  # not self: the thread would keep it
            threading.Thread(target=_serve, args=given, name="side-by-side", daemon=True).start()
            weakref.finalize(self, tasks.put, None)

    def run(self, task: Task) -> None:
        """Call task(number) in each thread; returns, or raises, once all have ended."""
        for tasks in self._tasks:
            tasks.put(task)
        try:
            task(0)
        finally:
            problems = [self._ends.get() for _ in self._tasks]
        for problem in problems:
            if problem is not None:
                raise problem

    def part(self, number: int, size: int, unit: int = 1) -> slice:
        """A thread's part of `size` things, in whole units."""
        units = -(-size // unit)
        start, stop = (min(size, units * at // self.count * unit) for at in (number, number + 1))
        return slice(start, stop)


ALONE = Threads()


def _serve(number: int, tasks: Tasks, ends: Ends) -> None:
    while (task := tasks.get()) is not None:
        try:
            task(number)
        except BaseException as problem:  # raised where the task was given
            ends.put(problem)
        else:
            ends.put(None)
        del task


def steps(whole: slice, most: int) -> list[slice]:
    """A range in parts of about one size, at most `most`."""
    size = whole.stop - whole.start
    step = -(-size // max(1, -(-size // most)))
    return [
        slice(start, min(whole.stop, start + step))
        for start in range(whole.start, whole.stop, max(1, step))
    ]
