"""Limits on foreign code: what passes them is ended, and afterwards they are as before."""

from __future__ import annotations

import resource
import signal
import sys
import threading

import pytest

from runtime.data.limits import TooSlowError, bounded_memory, bounded_seconds


def limits() -> tuple[object, ...]:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU)
    return (*map(resource.getrlimit, kinds), signal.getsignal(signal.SIGXCPU))


def test_code_that_computes_for_too_long_is_interrupted() -> None:
    before = limits()
    with pytest.raises(TooSlowError), bounded_seconds(1):
        while True:
            pass
    assert limits() == before
    with bounded_seconds(100):
        assert limits() != before
    assert limits() == before


def test_a_lower_limit_that_is_there_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    lower = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 500
    resource.setrlimit(resource.RLIMIT_CPU, (lower, hard))
    try:
        with bounded_seconds(10_000):
            assert resource.getrlimit(resource.RLIMIT_CPU) == (lower, hard)
        assert resource.getrlimit(resource.RLIMIT_CPU) == (lower, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_code_that_takes_too_much_memory_is_ended() -> None:
    before = limits()
    with pytest.raises(MemoryError), bounded_memory(1 << 26):
        bytearray(1 << 33)  # more than the heap of this process has free
    assert limits() == before


def test_other_threads_are_not_bounded() -> None:
    before, found = limits(), []

    def look() -> None:
        with bounded_seconds(1):
            found.append(limits())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
