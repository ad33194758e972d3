"""Importing the parts that the repository has and an installed wheel has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.core.errors import UsageError

PARTS = ("harness.peers", "harness.tasks")  # that pyproject.toml leaves out of the wheel


@contextmanager
def repository_only() -> Iterator[None]:
    """Modules of `PARTS` are imported inside of it.

    Raises:
        UsageError: they are not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in PARTS:
            raise
        raise UsageError(
            f"{missing.name} is in the repository of ondevice only; clone it, and there run "
            "`pip install -e .` and this command"
        ) from None
