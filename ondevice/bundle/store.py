"""The bundle on disk: written whole or not at all, and checked before a byte of it is used.

manifest.json   what `ondevice.bundle.manifest` describes; the last file written
weights.bin     every tensor in its range of bytes; a block's tensors lie together, page-aligned
graphs/         serialized elementwise graphs, one file per graph, direction and bucket
tokenizer/      the tokenizer's files, named as Hugging Face names them
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import Manifest, manifest_bytes, read_manifest
from ondevice.errors import BundleError, UsageError
from ondevice.files import fsync_path, read_file, reading_errors, sha256_file, storage_errors
from ondevice.lora import LoraSettings
from ondevice.operations.tensors import ALIGNMENT, PAGE, Extent, File
from ondevice.paths import partial_folder, text_path

MANIFEST, WEIGHTS, GRAPHS, TOKENIZER = "manifest.json", "weights.bin", "graphs", "tokenizer"
NEW, OLD = "new", "old"  # the unfinished bundle, and the one that it replaces
MAX_MANIFEST_BYTES = 4 << 20  # 20 times that of a model of 4 billion parameters


@dataclass(frozen=True)
class Bundle:
    """An open bundle: its folder and its checked manifest.

    `graphs_path` is the folder of the graphs that may run, to which the manifest's names of graphs
    are relative. It is None where nobody has decided yet (see `runtime.run.traced_graphs`).
    """

    path: Path
    manifest: Manifest
    graphs_path: Path | None = None

    @property
    def weights_path(self) -> Path:
        return self.path / WEIGHTS

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    def with_lora(self, lora: LoraSettings) -> Bundle:
        """The same bundle with other adapters than its default."""
        return replace(self, manifest=self.manifest.with_lora(lora))

    def verify(self) -> None:
        """Check every checksum.

        Raises:
            BundleError: naming the first file that differs or cannot be read.
        """
        self.verify_small()
        with reading_errors(self.weights_path):
            found = sha256_file(self.weights_path)
        if found != self.manifest.weights_sha256:
            raise BundleError(f"{self.weights_path} is altered: its SHA-256 differs; export again")

    def verify_small(self) -> None:
        """Check the checksums of all files except the weights."""
        small = {g.file: g.sha256 for g in self.manifest.graphs.values()}
        small |= {name: file.sha256 for name, file in self.manifest.files.items()}
        for name, expected in small.items():
            with reading_errors(self.path / name):
                found = sha256_file(self.path / name)
            if found != expected:
                raise BundleError(f"{self.path / name} is altered: its SHA-256 differs")


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle, checking its manifest and every file's presence and size.

    Raises:
        BundleError: not a bundle, truncated, inconsistent, or not readable.
        UsageError: the path is not valid UTF-8.
    """
    folder = text_path(path)
    with reading_errors(folder / MANIFEST):
        manifest = _read_manifest(folder)
    bundle = Bundle(folder, manifest)
    sizes = {WEIGHTS: manifest.weights_nbytes}
    sizes |= {graph.file: graph.nbytes for graph in manifest.graphs.values()}
    sizes |= {name: file.nbytes for name, file in manifest.files.items()}
    root = folder.resolve()
    for name, expected in sizes.items():
        file = folder / name
        with reading_errors(file):
            if not file.is_file():
                raise BundleError(f"{folder}: {name} is missing")
            if not file.resolve().is_relative_to(root):
                raise BundleError(f"{folder}: {name} leads out of the bundle")
            if (found := file.stat().st_size) != expected:
                raise BundleError(f"{file} has {found} bytes, expected {expected}: truncated?")
    return bundle


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        old = partial_folder(folder) / OLD
        aside = (
            f"; a forced export was stopped while it replaced the bundle there, which is whole in "
            f"{old}: export again, or move it back"
        )
        lost = not folder.exists() and (old / MANIFEST).is_file()
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}{aside if lost else ''}")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{folder}: {MANIFEST} leads out of the bundle")
    if (size := path.stat().st_size) > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{path} has {size:,} bytes: not a manifest, which has {MAX_MANIFEST_BYTES:,} at most"
        )
    manifest = read_manifest(read_file(path), str(path))
    check_manifest(manifest)
    return manifest


class BundleWriter:
    """Builds a bundle beside its destination and moves it there in one rename.

    Use it as a context manager: an exception, Ctrl-C included, removes everything that was written.
    The unfinished bundle is the folder `.NAME.partial/new`, and one process at a time locks
    `.NAME.partial`. A bundle that is replaced is first renamed to `.NAME.partial/old`. If a killed
    process left it there, the next writer puts it back before it clears the folder.
    """

    def __init__(self, destination: Path, force: bool = False) -> None:
        self.destination = text_path(destination)
        self.force = force
        self.place = partial_folder(destination)
        self.folder = self.place / NEW
        self.offset = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> BundleWriter:
        with storage_errors(self.destination):
            self._sweep()
            self._refuse_existing()
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            try:
                if self._put_back() and not self.force:
                    raise UsageError(
                        f"{self.destination} is back in place, after a forced export was stopped "
                        "while it replaced it; choose another or pass --force"
                    )
                self._check_destination()
                self._empty()  # of what a killed export left
                (self.folder / GRAPHS).mkdir(parents=True)
                self._weights = (self.folder / WEIGHTS).open("wb")
            except BaseException:
                self._clear()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):  # its buffer, on a full disk; `finish_weights` has reported it
            self._weights.close()
        with storage_errors(self.place):
            self._clear()

    def _sweep(self) -> None:
        """Remove what a process has left that was killed once its bundle was in place."""
        if self.force or not self.place.is_dir() or not (self.destination / MANIFEST).is_file():
            return
        with suppress(UsageError):  # another process is exporting: it removes its own
            self._lock = self._locked()
            self._clear()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.destination) and not self.force:
            raise UsageError(f"{self.destination} exists; choose another or pass --force")

    def _check_destination(self) -> None:
        self._refuse_existing()
        if not os.path.lexists(self.destination):
            return
        ours = self.destination.is_dir() and not self.destination.is_symlink()
        if not ours or not (
            (self.destination / MANIFEST).exists() or not any(self.destination.iterdir())
        ):
            raise UsageError(f"{self.destination} is not a bundle; it is not replaced")

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
        """Undo an unfinished replacement of a bundle; returns whether there was one."""
        old = self.place / OLD
        if os.path.lexists(self.destination) or not (old / MANIFEST).is_file():
            return False
        old.rename(self.destination)
        fsync_path(self.destination.parent)
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
        # without its manifest, a half-removed bundle cannot be taken for a complete one
        (self.place / OLD / MANIFEST).unlink(missing_ok=True)
        for left in self.place.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()

    def align(self, alignment: int = ALIGNMENT) -> None:
        self._write(bytes(-self.offset % alignment))

    def align_block(self) -> None:
        """Pad to the start of a page, where the next block's tensors begin."""
        self.align(PAGE)

    def tensor(self, chunks: Iterable[bytes], dtype: str, shape: tuple[int, ...]) -> Extent:
        """Append a tensor's bytes, little-endian and row-major."""
        self.align()
        start = self.offset
        for chunk in chunks:
            self._write(chunk)
        return Extent(start, self.offset - start, dtype, shape)

    def _write(self, data: bytes) -> None:
        with storage_errors(self.folder / WEIGHTS):
            self._weights.write(data)
        self._digest.update(data)
        self.offset += len(data)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes of weights.bin that have been written."""
        path = self.folder / WEIGHTS
        with storage_errors(path):
            self._weights.flush()
        with reading_errors(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def finish_weights(self) -> tuple[int, str]:
        """Flush weights.bin. Returns its size in bytes and its SHA-256."""
        with storage_errors(self.folder / WEIGHTS):
            self._weights.flush()
            os.fsync(self._weights.fileno())
        return self.offset, self._digest.hexdigest()

    def file(self, name: str, data: bytes) -> File:
        """Write a small file of the bundle."""
        path = self.folder / name
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            fsync_path(path)
        return File(len(data), hashlib.sha256(data).hexdigest())

    def commit(self, manifest: Manifest) -> Bundle:
        """Write the manifest and move the bundle to its destination."""
        check_manifest(manifest)
        data = manifest_bytes(manifest)
        if len(data) > MAX_MANIFEST_BYTES:
            raise BundleError(
                f"{MANIFEST} would have {len(data):,} bytes, more than the {MAX_MANIFEST_BYTES:,} "
                "that are read; export for fewer --seq-lens"
            )
        self.file(MANIFEST, data)
        with storage_errors(self.destination):
            for folder in (*filter(Path.is_dir, self.folder.iterdir()), self.folder):
                fsync_path(folder)
            if self.destination.exists():
                self.destination.rename(self.place / OLD)
            self.folder.rename(self.destination)
            fsync_path(self.destination.parent)
        return Bundle(self.destination, manifest, self.destination)
