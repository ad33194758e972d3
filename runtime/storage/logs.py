"""A log that gets a line for every step, and the checksum of its content so far."""

from __future__ import annotations

import hashlib
import os
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.core.errors import BundleError, StorageError
from runtime.core.files import (
    CHUNK_BYTES,
    flush,
    reading_errors,
    require_file,
    storage_errors,
    write_atomic,
)


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a log: how long it is, and its SHA-256."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class Log:
    """A file that grows by whole lines; its checksum is carried on, and never read back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._nbytes = 0
        self._file: FileIO | None = None

    @property
    def prefix(self) -> Prefix:
        """All that it holds."""
        return Prefix(self._nbytes, self._digest.hexdigest())

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def start(self, header: bytes = b"") -> None:
        """Write a new file that holds only the header."""
        write_atomic(self.path, header)
        self._open()
        self._count(header)

    def check(self, kept: Prefix, way_out: str) -> None:
        """Compare the beginning of the file with its checksum, and count it as written.

        Raises:
            BundleError: it differs, or the file is shorter.
        """
        with reading_errors(self.path):
            require_file(self.path)
            with FileIO(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                while chunk := file.read(min(CHUNK_BYTES, kept.nbytes - self._nbytes)):
                    self._count(chunk)
        if self.prefix != kept:
            raise BundleError(
                f"{self.path} is altered: the SHA-256 of its first {kept.nbytes} bytes is not the "
                f"one in the save; {way_out}"
            )

    def go_on(self) -> None:
        """Drop all that comes after the beginning that was checked."""
        self._open()
        assert self._file is not None
        with storage_errors(self.path):
            os.ftruncate(self._file.fileno(), self._nbytes)

    def append(self, line: str) -> None:
        """Add a line, which ends in a line break."""
        assert self._file is not None, "the log was neither started nor gone on with"
        data = left = line.encode()
        with storage_errors(self.path):
            while left:  # a disk that is almost full takes a part first
                left = left[self._file.write(left) :]
        self._count(data)

    def sync(self) -> Prefix:
        """Flush it to the disk; returns all that it holds.

        Raises:
            StorageError: its file is no longer where it was.
        """
        assert self._file is not None, "the log was neither started nor gone on with"
        with storage_errors(self.path):
            flush(self._file.fileno(), order_only=True)
            mine, there = os.fstat(self._file.fileno()), self.path.stat()
        if not os.path.samestat(mine, there) or there.st_size != self._nbytes:
            raise StorageError(
                f"{self.path} is no longer the file that training writes: it was removed, replaced "
                "or written by something else"
            )
        return self.prefix

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        with storage_errors(self.path):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW  # a link could lead anywhere
            self._file = FileIO(os.open(self.path, flags), "a")

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._nbytes += len(data)
