"""Calls of `runtime.data.process` in a fork of this process, which has imported all already."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fuzz.child import FAILED, SECONDS, Tell, in_child
from runtime.data import process
from runtime.data.process import main


@contextmanager
def forked_modules() -> Iterator[None]:
    """Let `process.ended` fork where it would start Python to call a function."""
    original = process.ended
    process.ended = _ended
    try:
        yield
    finally:
        process.ended = original


def _ended(
    command: Sequence[str], environment: object, given: str, told: object
) -> subprocess.CompletedProcess[str]:
    """As `process.ended`; stdout and stderr hold the same, what was written to both.

    Raises:
        RuntimeError: the function ended in a traceback, which whoever called it would only cite.
    """
    function = command[-1]

    def work(tell: Tell) -> int:
        sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
        return main([function])

    ended = in_child(work, Path("said by the function").absolute(), SECONDS)
    if ended.code == FAILED:
        raise RuntimeError(f"{function}: {ended.said}")
    code = -ended.signal if ended.signal else ended.code
    return subprocess.CompletedProcess(command, code, ended.said, ended.said)
