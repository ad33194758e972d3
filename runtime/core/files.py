"""Reading and writing files safely: whole or not at all, with errors that users understand."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.core.errors import BundleError, StorageError

CHUNK_BYTES = 1 << 20  # small, since a training's budget counts it
TOO_LARGE = (
    "this process, or the file system, limits how large a file may be; raise the limit (ulimit -f "
    "unlimited), or write elsewhere"
)
"""The cause of EFBIG, and the way out."""


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
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise OSError(errno.EINVAL, f"it is {what}, not a file", str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, also for what is none."""
    require_file(path)
    return path.read_bytes()


def read_small(path: Path, most_bytes: int, what: str) -> bytes:
    """The bytes of a file from elsewhere that is read whole, so it must not be large.

    Raises:
        BundleError: it has more than `most_bytes`; `what` is what it is taken for.
        OSError: as `read_file`.
    """
    if (size := path.stat().st_size) > most_bytes:
        raise BundleError(
            f"{path} has {size:,} bytes: not {what}, which has {most_bytes:,} at most"
        )
    return read_file(path)


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a reader sees the old bytes or the new, never a mix."""
    temporary = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` (a full disk, a read-only folder) into a `StorageError`."""
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise StorageError(f"{problem.strerror} while writing {path}: {TOO_LARGE}") from problem
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent if path.parent.exists() else Path("/")).free
            raise StorageError(
                f"the disk is full: {problem.strerror} while writing {path} "
                f"({free / 1e6:.0f} MB free); make room and start again"
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
