"""The prefetch thread: it lives as long as its owner, and its failures are not lost."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from support.waiting import wait_until

from runtime.core.errors import BundleError
from runtime.storage.read_ahead import ReadAhead


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "read-ahead"}


def fails(ahead: ReadAhead) -> bool:
    try:
        ahead.request(0, 1)
    except BundleError:
        return True
    return False


def test_the_thread_ends_with_its_owner(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "weights"
    path.write_bytes(rng.bytes(3_000_000))
    before = threads()
    ahead = ReadAhead(path)
    (mine,) = threads() - before
    for _ in range(5):
        start, stop = sorted(int(n) for n in rng.integers(0, 3_000_000, 2))
        ahead.request(start, stop)
    assert not fails(ahead)
    assert mine.is_alive()
    del ahead
    gc.collect()
    wait_until(lambda: not mine.is_alive())


def test_what_cannot_be_read_is_said_at_the_next_request(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing cannot be read: No such file"):
        ReadAhead(tmp_path / "missing")
    path = tmp_path / "short"
    path.write_bytes(b"short")
    short = ReadAhead(path)
    short.request(0, 100)
    wait_until(lambda: fails(short))
    with pytest.raises(BundleError, match="the file ended early"):
        short.request(0, 1)
