"""Flushing and reserving, as on macOS and elsewhere; the slices of a file make the file."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from pathlib import Path

import pytest
from support.bundles import Rng

from runtime.core import files
from runtime.core.files import F_BARRIERFSYNC, F_FULLFSYNC, F_PREALLOCATE, flush, reserve
from runtime.core.stripes import STRIPE, Stripes


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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_make_any_range_of_the_file(rng: Rng, count: int) -> None:
    whole = rng.bytes(7 * STRIPE + 1234)
    slices = []
    for index in range(count):
        pieces = Stripes(index, count).pieces(0, len(whole))
        slices.append(b"".join(whole[a:b] for a, b in pieces))
        assert len(slices[-1]) == Stripes(index, count).before(len(whole))
    assert sum(map(len, slices)) == len(whole)
    for _ in range(50):
        start, stop = sorted(int(at) for at in rng.integers(0, len(whole) + 1, 2))
        out = bytearray(stop - start)
        for index, own in enumerate(slices):
            at, end = Stripes(index, count).portion(start, stop)
            for a, b in Stripes(index, count).pieces(start, stop):
                out[a:b] = own[at : at + b - a]
                at += b - a
            assert at == end
        assert out == whole[start:stop]
