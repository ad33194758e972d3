"""Flushing and reserving: the commands of macOS where it is macOS, and `fsync` elsewhere."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from pathlib import Path

import pytest

from runtime.core import files
from runtime.core.files import F_BARRIERFSYNC, F_FULLFSYNC, F_PREALLOCATE, flush, reserve


class Darwin:
    """Counts what is asked of macOS, which refuses with `error` if that is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int | None = None) -> None:
        self.error = error
        self.asked: list[object] = []
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(fcntl, "fcntl", self._control)
        monkeypatch.setattr(os, "fsync", lambda fd: self.asked.append("fsync"))

    def _control(self, fd: int, command: int, argument: bytes = b"") -> bytes:
        self.asked.append((command, struct.unpack("Iiqqq", argument)) if argument else command)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return argument


def test_the_drive_is_flushed_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    darwin = Darwin(monkeypatch)
    flush(0)
    flush(0, order_only=True)
    assert darwin.asked == [F_FULLFSYNC, F_BARRIERFSYNC]


def test_a_file_system_that_knows_no_such_command_is_flushed_as_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    darwin = Darwin(monkeypatch, errno.ENOTSUP)
    flush(0)
    assert darwin.asked == [F_FULLFSYNC, "fsync"]


def test_a_broken_disk_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    darwin = Darwin(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        flush(0)
    assert darwin.asked == [F_FULLFSYNC]


@pytest.mark.parametrize("error", [None, errno.ENOTSUP])
def test_disk_is_reserved_on_macos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: int | None
) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"before")
        file.flush()
        there = 512 * os.fstat(file.fileno()).st_blocks
        darwin = Darwin(monkeypatch, error)
        reserve(file.fileno(), 3_000_000)
        request = (files.F_ALLOCATEALL, files.F_PEOFPOSMODE, 0, 3_000_000 - there, 0)
        assert darwin.asked == [(F_PREALLOCATE, request)]
        assert os.pread(file.fileno(), 8, 0) == b"before\0\0"
        assert os.fstat(file.fileno()).st_size == 3_000_000


def test_a_full_disk_is_said_when_it_is_reserved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("wb") as file:
        Darwin(monkeypatch, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            reserve(file.fileno(), 3_000_000)
        assert os.fstat(file.fileno()).st_size == 0


def test_a_file_that_is_large_enough_stays_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        reserve(file.fileno(), 100)
        assert file.seek(0) == 0 and file.read() == b"x" * 10_000
