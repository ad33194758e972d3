"""Messages in a folder that devices share, as by NFS, SMB or Syncthing: whole files, and no locks.

A message begins with a checksum over its session, its name and its content. A file that is half
written, damaged, renamed or of another session is none: it is ignored, and counted. A file that is
not visible yet is waited for.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from runtime.core.errors import BundleError, OnDeviceError
from runtime.core.files import read_small, replacing, sha256_file, storage_errors, write_atomic

MOST_BYTES = 1 << 24  # of a message
SEAL_BYTES = 8
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


def pause(waited_s: float) -> None:
    """Wait before the next look, the longer the more seconds have passed."""
    time.sleep(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 20)))


class SharedFolder:
    """The messages of a folder; `session` is a name that is in no file, at first that of none."""

    def __init__(self, path: Path) -> None:
        self.path, self.session = path, ""
        self.ignored: set[str] = set()  # names of files that are no messages
        self.nbytes = 0  # of the messages that were written and read

    def names(self) -> list[str]:
        """The names of all files but hidden ones; none while the folder cannot be reached."""
        try:
            return [path.name for path in self.path.iterdir() if path.name[0] not in ".~"]
        except OSError:
            return []

    def read(self, name: str) -> bytes | None:
        """The content of a message; None if it is not there, or the file is none."""
        try:
            data = read_small(self.path / name, MOST_BYTES, "a message")
        except FileNotFoundError:
            return None
        except (OSError, OnDeviceError):
            self.ignored.add(name)
            return None
        content = data[SEAL_BYTES:]
        if data != self._sealed(name, content):
            self.ignored.add(name)
            return None
        self.ignored.discard(name)  # it was not whole when it was read before
        self.nbytes += len(data)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a message. Raises StorageError."""
        data = self._sealed(name, content)
        write_atomic(self.path / name, data)
        self.nbytes += len(data)

    def remove(self, name: str) -> None:
        """Remove a message that nobody needs."""
        with suppress(OSError):  # it is seen again, and of no harm
            (self.path / name).unlink()

    def put(self, source: Path | bytes) -> str:
        """Lay a file of any size into the folder, under a name of its SHA-256, which is returned.

        Raises:
            StorageError: it cannot be written.
        """
        with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            with replacing(self.path / _name_of(sha256)) as copy:
                shutil.copyfileobj(file, copy)
        return sha256

    def fetch(self, sha256: str, target: Path) -> bool:
        """Copy the file of a SHA-256 out of the folder; False if it is not there, or not whole."""
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(self.path / _name_of(sha256), target)
                return sha256_file(target) == sha256
        return False

    def _sealed(self, name: str, content: bytes) -> bytes:
        digest = hashlib.sha256(f"{self.session}/{name}/".encode() + content).digest()
        return digest[:SEAL_BYTES] + content


def _name_of(sha256: str) -> str:
    if len(sha256) != 64 or not sha256.isalnum():
        raise BundleError(f"{sha256!r:.80} is no SHA-256")
    return f"file-{sha256[:16]}"
