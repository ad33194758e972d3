"""Threads that run the parts of one task."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.bundles import Rng

from runtime.arrays.threads import Threads, steps


def test_parts_are_a_range_in_order_and_whole_units(rng: Rng) -> None:
    for _ in range(100):
        count, unit, size = (int(n) for n in rng.integers(1, (6, 40, 1000)))
        threads = Threads(count)
        parts = [threads.part(number, size, unit) for number in range(count)]
        places = np.concatenate([np.arange(size)[part] for part in parts])
        assert (places == np.arange(size)).all()
        assert all(part.start % unit == 0 or part.start == size for part in parts)
        most = int(rng.integers(1, 1100))
        cut = steps(slice(3, 3 + size), most)
        assert (np.concatenate([np.arange(3 + size)[part] for part in cut]) >= 3).all()
        assert sum(part.stop - part.start for part in cut) == size
        assert max(part.stop - part.start for part in cut) <= most


def test_each_part_has_its_own_thread_and_the_first_the_callers() -> None:
    seen: dict[int, int] = {}
    threads = Threads(3)
    threads.run(lambda number: seen.update({number: threading.get_ident()}))
    assert sorted(seen) == [0, 1, 2] and len(set(seen.values())) == 3
    assert seen[0] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_a_part_is_raised_once_all_have_ended(failing: int) -> None:
    threads, ended = Threads(2), []

    def task(number: int) -> None:
        if number == failing:
            raise ZeroDivisionError(str(number))
        ended.append(number)

    for _ in range(2):  # they go on after it
        with pytest.raises(ZeroDivisionError, match=str(failing)):
            threads.run(task)
    assert ended == [1 - failing] * 2
