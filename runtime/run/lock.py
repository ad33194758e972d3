"""The lock of a run's folder against other processes, and whether the folder is still there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from runtime.core.errors import StorageError, UsageError
from runtime.core.files import reading_errors, require_file, storage_errors

LOCK = ".lock"


class RunLock:
    """The lock of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._directory: int | None = None  # open while the run is locked

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes away.

        Raises:
            UsageError: another process is training the run.
        """
        with self._taken(storage_errors, "a", fcntl.LOCK_EX) as is_free:
            if not is_free:
                raise UsageError(f"another process is training {self.folder}")
            # while it is open, no other folder gets its inode
            self._directory = os.open(self.folder, os.O_RDONLY)
            try:
                yield
            finally:
                os.close(self._directory)
                self._directory = None

    @contextmanager
    def held_to_read(self) -> Iterator[bool]:
        """Keep other processes from training the run; yields whether none is.

        Nothing is written, so a run on a disk that is read-only counts as still.
        """
        if not (self.folder / LOCK).exists():
            yield True
            return
        with self._taken(reading_errors, "rb", fcntl.LOCK_SH) as is_free:
            yield is_free

    @contextmanager
    def _taken(
        self, errors: Callable[[Path], AbstractContextManager[None]], mode: str, operation: int
    ) -> Iterator[bool]:
        """Take the lock, unless another process has it; yields whether none has."""
        path = self.folder / LOCK
        with errors(path):
            if path.exists():
                require_file(path)
            file = path.open(mode)
        with file:
            try:
                fcntl.flock(file, operation | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
            yield is_free

    @property
    def is_there(self) -> bool:
        """Whether the folder that was locked is still at its path."""
        assert self._directory is not None, "the run is not locked"
        try:
            return os.path.samestat(os.fstat(self._directory), self.folder.stat())
        except OSError:
            return False

    def check_there(self) -> None:
        """Refuse to write at the run's path once its folder is not there.

        Raises:
            StorageError: it was moved or removed.
        """
        if self._directory is not None and not self.is_there:
            raise StorageError(
                f"{self.folder} was moved or removed while it was trained; nothing more is written "
                "there. If it was moved, go on from its last save with ondevice train --resume "
                "and the place where it is now"
            )
