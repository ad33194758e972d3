"""Workers of one run, as threads of this process or as processes that `mpirun` starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from runtime.parallel.exchange import Exchange
from support.forks import ROOT

T = TypeVar("T")

NEEDS_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI")
LONGEST_WAIT_S = 60  # after which a test that hangs fails


class ThreadExchange(Exchange):
    """One of several threads, which share a list and a barrier."""

    def __init__(self, rank: int, messages: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(messages)
        self._messages, self._barrier = messages, barrier

    def _all_bytes(self, message: bytes) -> list[bytes]:
        self._messages[self.rank] = message
        self._barrier.wait(LONGEST_WAIT_S)
        messages = list(self._messages)
        assert len({len(each) for each in messages}) == 1, "MPI needs messages of one length"
        self._barrier.wait(LONGEST_WAIT_S)  # before the next call writes into the list
        return messages


def on_workers(size: int, work: Callable[[Exchange], T]) -> list[T]:
    """What `work` returns on each worker; the first error ends the others' waiting."""
    messages, barrier = [b""] * size, threading.Barrier(size)

    def worker(rank: int) -> T:
        try:
            return work(ThreadExchange(rank, messages, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(worker, rank) for rank in range(size)]
    errors = [error for result in results if (error := result.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [result.result() for result in results]


def mpirun(*commands: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """What several processes come to, which MPI connects: `python WORDS` for each.

    Their output is read from a file of each, rank by rank: on the terminal `mpirun` cuts it where
    the pipes end, within lines as well.
    """
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ranks = [
        word for words in commands for word in (":", "-n", "1", sys.executable, *map(str, words))
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", *as_root, "--oversubscribe", "--output-filename", folder]
        ended = subprocess.run(
            ["mpirun", *options, *ranks[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
        )

        def printed(stream: str) -> str:
            files = [Path(folder, "1", f"rank.{rank}", stream) for rank in range(len(commands))]
            return "".join(file.read_text() for file in files if file.exists())

        errors = printed("stderr") or ended.stderr  # mpirun's own, where it has started nothing
        return subprocess.CompletedProcess(ended.args, ended.returncode, printed("stdout"), errors)


def processes(count: int, code: str, *arguments: object) -> list[str]:
    """The lines that processes of `python -c CODE ARGUMENTS` print, rank 0's first."""
    ended = mpirun(*[["-c", code, *arguments]] * count)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


class Rehearsed(Exchange):
    """One of several workers, which run one after the other: once to speak, and again to hear.

    What a worker says must not depend on what it hears.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.said: list[bytes] = []
        self.heard: list[list[bytes]] | None = None  # of each call, from all workers

    def _all_bytes(self, message: bytes) -> list[bytes]:
        self.said.append(message)
        if self.heard is None:
            return [message] * self.size
        messages = self.heard[len(self.said) - 1]
        assert messages[self.rank] == message
        return messages


def in_turn(size: int, work: Callable[[Exchange], T]) -> list[T]:
    """What `work` returns on each worker, in the calling thread: MLX binds a graph to one."""
    rehearsed = [Rehearsed(rank, size) for rank in range(size)]
    for exchange in rehearsed:
        work(exchange)
    heard = [list(messages) for messages in zip(*(e.said for e in rehearsed), strict=True)]
    results = []
    for rank in range(size):
        exchange = Rehearsed(rank, size)
        exchange.heard = heard
        results.append(work(exchange))
        assert len(exchange.said) == len(heard)
    return results
