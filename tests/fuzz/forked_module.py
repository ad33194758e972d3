"""Runs of `python -m MODULE` in a fork of this process, which has imported everything already."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzz.child import FAILED, SECONDS, Tell, in_child


@contextmanager
def forked_modules() -> Iterator[None]:
    """Let `subprocess.run` fork where it would start Python with a module."""
    original = subprocess.run
    subprocess.run = _run
    try:
        yield
    finally:
        subprocess.run = original


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`; stdout and stderr hold the same, what was written to both.

    Raises:
        RuntimeError: the module ended in a traceback, which whoever called it would only cite.
    """
    _, _, _, module, *words = command

    def work(tell: Tell) -> int:
        return int(importlib.import_module(module).main(words))

    ended = in_child(work, Path("said by the module").absolute(), SECONDS)
    if ended.code == FAILED:
        raise RuntimeError(f"{module}: {ended.said}")
    code = -ended.signal if ended.signal else ended.code
    return subprocess.CompletedProcess(command, code, ended.said, ended.said)
