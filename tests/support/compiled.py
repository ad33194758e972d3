"""Compiled code for tests: where it runs, and in a cache folder of their own."""

from __future__ import annotations

import pytest

from runtime.machine.machine_code import lacking


def require_compiled() -> None:
    """Skip the test where code of LLVM cannot be compiled or run."""
    if why := lacking():
        pytest.skip(why)
