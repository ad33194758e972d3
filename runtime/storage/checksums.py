"""The checksums of a folder's files, in the folder's `checksums.json`.

Each file has one or two: the SHA-256 of a new content is added before the file is replaced, and
that of the old one is taken out after it, so that a kill at any instant leaves a file that agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from runtime.core.errors import BundleError
from runtime.core.files import read_file, reading_errors, require_file, sha256_file, write_atomic
from runtime.core.typed import decoded

CHECKSUMS = "checksums.json"

Sums = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Checksums:
    """The checksums of the files in `folder`."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / CHECKSUMS

    def read(self) -> Sums:
        """The SHA-256 that each file may have; none where there is no `checksums.json`.

        Raises:
            BundleError: it is damaged.
        """
        if not self.path.exists():
            return {}
        try:
            return decoded(read_file(self.path), Sums)
        except (OSError, ValueError) as problem:
            raise BundleError(f"{self.path} is damaged: {problem}") from None

    @contextmanager
    def replacing(self, name: str, sha256: str) -> Iterator[None]:
        """Record the SHA-256 of a file's new content, around the replacement of the file."""
        sums = self.read()
        before = sums.get(name, ())
        both = tuple(dict.fromkeys((*before, sha256)))
        if before != both:
            self._write({**sums, name: both})
        yield
        if both != (sha256,):
            self._write({**sums, name: (sha256,)})

    def record(self, name: str) -> None:
        """Record the SHA-256 of a file as it is."""
        sha256 = sha256_file(self.folder / name)
        self._write({**self.read(), name: (sha256,)})

    def check(self, name: str, way_out: str) -> None:
        """Compare a file with its checksum.

        Raises:
            BundleError: it differs, is gone, or has none; the message ends in the way out.
        """
        path = self.folder / name
        while True:
            if not path.exists():
                raise BundleError(f"{path} is not there; {way_out}")
            sums = self.read()
            with reading_errors(path):
                require_file(path)
                sha256 = sha256_file(path)
            if sha256 in sums.get(name, ()):
                return
            if self.read() == sums:  # else it was replaced meanwhile
                break
        if name not in sums:
            raise BundleError(f"{path} has no checksum in {self.path}; {way_out}")
        raise BundleError(
            f"{path} is altered: its SHA-256 is not the one in {self.path}; {way_out}"
        )

    def _write(self, sums: Sums) -> None:
        write_atomic(self.path, msgspec.json.format(msgspec.json.encode(sums), indent=1) + b"\n")
