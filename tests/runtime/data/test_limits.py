"""Limits on foreign code: what passes them is ended, and afterwards they are as before."""

from __future__ import annotations

import contextlib
import inspect
import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.token_rows import make_bundle

from runtime.core.errors import DataError
from runtime.data.limits import Limits, TooSlowError, bounded_memory, bounded_seconds
from runtime.data.source import prepare_tokens


def limits() -> tuple[object, ...]:
    timers = [signal.getitimer(which) for which in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)]
    return (resource.getrlimit(resource.RLIMIT_AS), timers, signal.getsignal(signal.SIGPROF))


def test_code_that_computes_for_too_long_is_interrupted() -> None:
    before = limits()
    with pytest.raises(TooSlowError), bounded_seconds(0.1):
        while True:
            pass
    assert limits() == before
    with bounded_seconds(100):
        assert limits() != before
    assert limits() == before


def test_code_that_swallows_the_interruption_is_interrupted_again() -> None:
    swallowed = 0
    with pytest.raises(TooSlowError), bounded_seconds(0.1):
        while True:
            try:
                while True:
                    pass
            except TooSlowError:
                swallowed += 1
                if swallowed == 2:
                    raise


def test_what_restores_the_limit_is_not_interrupted() -> None:
    """Else a signal at the end of one block would leave its limit to all that follow."""
    with bounded_seconds(100):
        interrupt = signal.getsignal(signal.SIGPROF)
        assert callable(interrupt)
        for restores in (contextlib.contextmanager, inspect.unwrap(bounded_seconds), signal.signal):
            interrupt(signal.SIGPROF, SimpleNamespace(f_code=restores.__code__))
        for _ in range(2):  # a callback may have swallowed the first
            with pytest.raises(TooSlowError):
                signal.raise_signal(signal.SIGPROF)


ENDLESS = """
import hashlib
from runtime.data.limits import Limits, bounded_seconds, confine
confine(Limits(1 << 40, 100))
with bounded_seconds(0.1):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_code_that_no_exception_reaches_is_ended_with_its_process() -> None:
    assert subprocess.run([sys.executable, "-c", ENDLESS]).returncode == -signal.SIGVTALRM


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


def tokenized_under(
    monkeypatch: pytest.MonkeyPatch, folder: Path, source: Path, limits: Limits
) -> None:
    monkeypatch.setattr(Limits, "of_data", lambda size_bytes: limits)
    prepare_tokens(make_bundle(folder / "bundle", {}), source, "train", 99, folder / "out")


def test_the_process_that_tokenizes_is_ended_when_it_has_taken_its_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "long.txt"
    source.write_text("the cat sat on the mat\n" * 1_000_000)
    said = r"tokenizing .*long\.txt was ended by SIGXCPU; it may take .* and 1 s of the CPU \(RLIM"
    with pytest.raises(DataError, match=said):
        tokenized_under(monkeypatch, tmp_path, source, Limits(1 << 40, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")
def test_the_process_that_tokenizes_is_ended_when_it_has_taken_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "large.json"
    source.write_text(json.dumps([{"text": "the cat"}] * 500_000))
    said = r"not enough memory: this process may take 0\.1 GB of memory \(RLIMIT_AS\) and 100 s"
    with pytest.raises(DataError, match=said):
        tokenized_under(monkeypatch, tmp_path, source, Limits(1 << 26, 100))
