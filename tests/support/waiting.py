"""Waiting for something to happen, however busy the machine is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

HANGS_S = 600  # nothing here takes so long, unless it never ends


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Look every 10 ms; fail where `process` ends first, or what is waited for never comes."""
    gives_up = time.monotonic() + HANGS_S
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < gives_up, "it never came"
        time.sleep(0.01)
