"""Reading and writing files safely: whole or not at all, with errors that users understand."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtime.core.errors import BundleError, StorageError

CHUNK_BYTES = 1 << 20  # small, since a training's budget counts it
TOO_LARGE = (
    "this process, or the file system, limits how large a file may be; raise the limit (ulimit -f "
    "unlimited), or write elsewhere"
)
"""The cause of EFBIG, and the way out."""

# Commands of macOS's fcntl and their arguments, from Apple's sys/fcntl.h
F_PREALLOCATE = 42
F_FULLFSYNC = 51
F_BARRIERFSYNC = 85
F_ALLOCATEALL = 4
F_PEOFPOSMODE = 3
UNKNOWN_COMMAND = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
"""The errors of a file system that does not know such a command."""


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal; reads it in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def require_file(path: Path) -> None:
    """Raise OSError unless a path leads to a regular file: to open a FIFO may take forever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, also for what is none."""
    require_file(path)
    return path.read_bytes()


def read_small(path: Path, most_bytes: int, kind: str) -> bytes:
    """The bytes of a file from elsewhere that is read whole, so it must not be large.

    Raises:
        BundleError: it has more than `most_bytes`; `kind` is what it is taken for.
        OSError: as `read_file`.
    """
    if (size := path.stat().st_size) > most_bytes:
        raise BundleError(
            f"{path} has {size:,} bytes: not {kind}, which has {most_bytes:,} at most"
        )
    return read_file(path)


def read_into(fd: int, offset: int, out: memoryview) -> None:
    """Fill `out` with the bytes of a file from `offset` on. Raises OSError where it ends early."""
    while out:
        count = os.preadv(fd, [out], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        out, offset = out[count:], offset + count


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def flush(fd: int, *, order_only: bool = False) -> None:
    """Flush a file, or a folder's entries, to the disk.

    On macOS `fsync` may leave the bytes in the drive's own cache, which F_FULLFSYNC writes out.
    With `order_only`, F_BARRIERFSYNC takes less time, and keeps only the order: after a power cut
    nothing that was flushed later is there without these bytes. File systems that know neither,
    such as those of a network, get `fsync`. Elsewhere `fsync` does all of it.
    """
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(fd, F_BARRIERFSYNC if order_only else F_FULLFSYNC)
            return
        except OSError as problem:
            if problem.errno not in UNKNOWN_COMMAND:
                raise
    os.fsync(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Give a file at least `nbytes` of disk, or fail now (OSError) instead of at a page fault."""
    if sys.platform != "darwin":
        os.posix_fallocate(fd, 0, max(1, nbytes))
        return
    facts = os.fstat(fd)
    missing = nbytes - 512 * facts.st_blocks
    if missing > 0:
        # struct fstore: flags, where to begin, offset, length, bytes that were reserved
        request = struct.pack("Iiqqq", F_ALLOCATEALL, F_PEOFPOSMODE, 0, missing, 0)
        try:
            fcntl.fcntl(fd, F_PREALLOCATE, request)
        except OSError as problem:
            if problem.errno not in UNKNOWN_COMMAND:
                raise
            _append_zeros(fd, nbytes - facts.st_size)
    if facts.st_size < nbytes:
        os.ftruncate(fd, nbytes)


def _append_zeros(fd: int, count: int) -> None:
    os.lseek(fd, 0, os.SEEK_END)
    block = bytes(CHUNK_BYTES)
    while count > 0:
        count -= os.write(fd, block[: min(count, len(block))])


def flush_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flush(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of `path` at the end; after an error none does.

    A reader sees the old bytes or the new, never a mix.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                flush(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush_path(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, see `replacing`."""
    with replacing(path) as file:
        file.write(data)


def free_bytes(folder: Path) -> int | None:
    """The free bytes of a folder's file system; None if it states no size, as some of FUSE."""
    size, _, free = shutil.disk_usage(folder)
    return free if size else None


@contextmanager
def storage_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an `OSError` (a full disk, a read-only folder) into a `StorageError`.

    `needed_bytes` are those of the file, if its size is known.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise StorageError(f"{problem.strerror} while writing {path}: {TOO_LARGE}") from problem
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent if path.parent.exists() else Path("/")).free
            needed = f", {needed_bytes / 1e6:.0f} MB needed" if needed_bytes else ""
            raise StorageError(
                f"the disk is full: {problem.strerror} while writing {path} "
                f"({free / 1e6:.0f} MB free{needed}); make room"
            ) from problem
        why = problem.strerror or f"{problem}; is the disk full?"  # NumPy's has only a text
        raise StorageError(f"cannot write {path}: {why}") from problem


@contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` (no permission, a broken disk) into a `BundleError`."""
    try:
        yield
    except OSError as problem:
        raise BundleError(f"{path} cannot be read: {problem.strerror}") from problem


@contextmanager
def private_copy(data: bytes) -> Iterator[str]:
    """A path at which these bytes can be read meanwhile, and no other program can change them."""
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("ondevice"), "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.TemporaryDirectory() as folder:  # this user's alone
            path = Path(folder, "copy")
            path.write_bytes(data)
            yield str(path)
