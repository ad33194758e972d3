"""Folders and files that are written whole or not at all: built beside their place, then renamed.

Unfinished output lies in `.NAME.partial/new`, and one process at a time locks `.NAME.partial`.
Output to replace is first renamed to `.NAME.partial/old`. If a killed process left it there, the
next writer puts it back before it clears the folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runtime.core.errors import StorageError, UsageError
from runtime.core.files import flush_path, free_bytes, remove, storage_errors
from runtime.core.paths import output_path, partial_folder
from runtime.core.units import format_bytes

NEW, OLD = "new", "old"  # unfinished output, and the output that it replaces
_UNASKED = frozenset({".DS_Store"})  # file managers put it into any folder


class FolderWriter:
    """Builds a folder beside its destination and moves it there in one rename.

    Use it as a context manager: an exception, Ctrl-C included, removes everything that was written.

    Args:
        destination: where it is to be.
        force: whether one that is there is replaced; anything else is never replaced.
        marker: the file by which a finished one is recognised; "" where the destination is itself
            a file.
        noun: its kind, for messages.
        belongs: whether what is at a path is part of one: the destination where it is a file, else
            each entry of the folder. Something with other parts is never replaced.
    """

    def __init__(
        self,
        destination: Path,
        force: bool,
        marker: str,
        noun: str,
        belongs: Callable[[Path], bool],
    ) -> None:
        self.destination = output_path(destination)
        self._belongs = belongs
        self.force, self.marker, self.noun = force, marker, noun
        self.place = partial_folder(destination)
        self.folder = self.place / NEW

    def __enter__(self) -> FolderWriter:
        with storage_errors(self.destination):
            self._sweep()
            self._refuse_existing()
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            try:
                if self._put_back() and not self.force:
                    raise UsageError(
                        f"{self.destination} is back in place, after a forced export was "
                        "stopped while it replaced it; choose another or pass --force"
                    )
                self._check_destination()
                self._empty()  # of the remains of a killed process
                self.folder.mkdir()
            except BaseException:
                self._clear()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with storage_errors(self.place):
            self._clear()

    def check_space(self, needed: int, options: str = "--output") -> None:
        """Raise StorageError if the disk has too little space, before anything is written.

        `options` are those that change how much is needed, or where.
        """
        free = free_bytes(self.folder)
        if free is not None and needed > free:
            raise StorageError(
                f"{self.destination} needs about {format_bytes(needed, up=True)}, but only "
                f"{format_bytes(free)} are free there; make room, or choose another {options}"
            )

    def _sweep(self) -> None:
        """Remove what a process has left that was killed once its result was in place."""
        if self.force or not self.place.is_dir() or not self._is_ours(self.destination):
            return
        with suppress(UsageError):  # another process is writing: it removes its own
            self._lock = self._locked()
            self._clear()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.destination) and not self.force:
            raise UsageError(f"{self.destination} exists; choose another or pass --force")

    def _check_destination(self) -> None:
        self._refuse_existing()
        if not os.path.lexists(self.destination):
            return
        if self.destination.is_symlink():
            raise UsageError(
                f"{self.destination} is a link, which is not replaced: give the path to which it "
                f"leads, {self.destination.resolve()}"
            )
        if not self._is_ours(self.destination) and not self._is_empty_folder(self.destination):
            raise UsageError(f"{self.destination} is not a {self.noun}; it is not replaced")
        if others := self._others():
            first = ", ".join(others[:3])
            raise UsageError(
                f"{self.destination} holds other files than those of a {self.noun} ({first}); it "
                "is not replaced: choose another --output"
            )

    def _others(self) -> list[str]:
        """The entries of a replaced folder that belong to something else."""
        if not self.marker:
            return []
        entries = (path for path in self.destination.iterdir() if path.name not in _UNASKED)
        return sorted(path.name for path in entries if not self._belongs(path))

    def _is_ours(self, path: Path) -> bool:
        return (path / self.marker).is_file() and (bool(self.marker) or self._belongs(path))

    def _is_empty_folder(self, path: Path) -> bool:
        return bool(self.marker) and path.is_dir() and not any(path.iterdir())

    def _locked(self) -> int:
        """Create `.NAME.partial`, or reuse one that a killed process left, and lock it."""
        while True:
            with suppress(FileExistsError):  # not exist_ok, which looks again, and may find nothing
                self.place.mkdir()
            with suppress(FileNotFoundError):  # the process that had it has just removed it
                lock = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(lock), self.place.lstat()):
                        return lock
                except BlockingIOError:
                    os.close(lock)
                    raise UsageError(
                        f"another process is exporting to {self.destination}; wait for it or "
                        "choose another"
                    ) from None
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)

    def _put_back(self) -> bool:
        """Undo an unfinished replacement; returns whether there was one."""
        old = self.place / OLD
        if os.path.lexists(self.destination) or not self._is_ours(old):
            return False
        old.rename(self.destination)
        flush_path(self.destination.parent)
        return True

    def _clear(self) -> None:
        """Remove all but the destination, and unlock."""
        try:
            self._put_back()
            self._empty()
            self.place.rmdir()
        finally:
            os.close(self._lock)

    def _empty(self) -> None:
        # without its marker, a half removed folder cannot be taken for a complete one
        (self.place / OLD / self.marker).unlink(missing_ok=True)
        for left in self.place.iterdir():
            remove(left)

    def finish(self, result: Path | None = None) -> None:
        """Move what was written to its destination: the folder, or one file of it.

        Its files must have been flushed to the disk.
        """
        with storage_errors(self.destination):
            for folder in (*filter(Path.is_dir, self.folder.iterdir()), self.folder):
                flush_path(folder)
            if os.path.lexists(self.destination):
                self.destination.rename(self.place / OLD)
            (self.folder if result is None else result).rename(self.destination)
            flush_path(self.destination.parent)
