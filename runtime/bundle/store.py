"""The bundle on disk: written whole or not at all, and checked before a byte of it is used.

manifest.json   what `runtime.bundle.manifest` describes; the last file written
weights.bin     every tensor in its range of bytes; a block's tensors lie together, page-aligned;
                in one of several slices of a bundle, the stripes of that slice
graphs/         serialized elementwise graphs, one file per graph, direction and bucket
tokenizer/      the tokenizer's files, named as Hugging Face names them
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.adapters.lora import LoraSettings
from runtime.arrays.stored import ALIGNMENT, PAGE, Extent, File
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import Manifest, Slice, manifest_bytes, read_manifest
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import (
    flush,
    flush_path,
    read_file,
    read_small,
    reading_errors,
    sha256_file,
    storage_errors,
)
from runtime.core.folder_writer import OLD, FolderWriter
from runtime.core.lookalikes import Kind, instead
from runtime.core.paths import partial_folder, text_path
from runtime.core.stripes import STRIPE, Stripes
from runtime.core.units import format_bytes

if TYPE_CHECKING:
    from runtime.parallel.holders import Holders

MANIFEST, WEIGHTS, GRAPHS, TOKENIZER = "manifest.json", "weights.bin", "graphs", "tokenizer"
MAX_MANIFEST_BYTES = 4 << 20  # 20 times that of a model of 4 billion parameters


@dataclass(frozen=True)
class Bundle:
    """An open bundle: its folder and its checked manifest.

    `graphs_path` is the folder of the graphs that may run, to which the manifest's names of graphs
    are relative. It is None where nobody has decided yet (see `runtime.run.traced_graphs`).
    `holders` are the workers that hold the slices of its weights; None if it is whole or alone.
    """

    path: Path
    manifest: Manifest
    graphs_path: Path | None = None
    holders: Holders | None = None

    @property
    def weights_path(self) -> Path:
        """The file of all weights.

        Raises:
            UsageError: it holds a slice of them.
        """
        self.require_whole()
        return self.path / WEIGHTS

    @property
    def held_path(self) -> Path:
        """The file of the weights that are there: all, or a slice."""
        return self.path / WEIGHTS

    def require_whole(self) -> None:
        """Return if all weights are there.

        Raises:
            UsageError: it holds a slice of them.
        """
        if (part := self.manifest.slice) is not None:
            raise UsageError(
                f"{self.path} is {part} of a bundle, and holds 1/{part.of} of its weights; take "
                f"the whole bundle, or start `ondevice train` or `eval` with all {part.of} slices: "
                f"mpirun -n {part.of} ondevice COMMAND ... --parallel data={part.of}, on each "
                "machine with its own slice"
            )

    def with_lora(self, lora: LoraSettings) -> Bundle:
        """The same bundle with other adapters than its default."""
        return replace(self, manifest=self.manifest.with_lora(lora))

    def verify(self) -> None:
        """Check every checksum.

        Raises:
            BundleError: naming the first file that differs or cannot be read.
        """
        self.verify_small()
        part = self.manifest.slice
        expected = self.manifest.weights_sha256 if part is None else part.sha256
        with reading_errors(self.held_path):
            sha256 = sha256_file(self.held_path)
        if sha256 != expected:
            again = "export again" if part is None else f"make or copy {part} again"
            raise BundleError(f"{self.held_path} is altered: its SHA-256 differs; {again}")

    def verify_small(self) -> None:
        """Check the checksums of all files except the weights."""
        small = {g.file: g.sha256 for g in self.manifest.graphs.values()}
        small |= {name: file.sha256 for name, file in self.manifest.files.items()}
        for name, expected in small.items():
            with reading_errors(self.path / name):
                sha256 = sha256_file(self.path / name)
            if sha256 != expected:
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
    sizes = {WEIGHTS: manifest.held_nbytes}
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
            if (nbytes := file.stat().st_size) != expected:
                raise BundleError(f"{file} has {nbytes} bytes, expected {expected}: truncated?")
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
        if lost:
            raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}{aside}")
        why = instead(folder, Kind.BUNDLE) or f"it has no {MANIFEST}"
        raise BundleError(f"{folder} is no bundle: {why}")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{folder}: {MANIFEST} leads out of the bundle")
    manifest = read_manifest(read_small(path, MAX_MANIFEST_BYTES, "a manifest"), str(path))
    check_manifest(manifest)
    return manifest


def _belongs(path: Path) -> bool:
    """Whether a bundle has such an entry."""
    return path.name in (MANIFEST, WEIGHTS, TOKENIZER) or path.name.startswith(GRAPHS)


class BundleWriter(FolderWriter):
    """Builds a bundle beside its destination and moves it there in one rename."""

    def __init__(self, destination: Path, force: bool = False) -> None:
        super().__init__(destination, force, MANIFEST, "bundle", _belongs)
        self.offset = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> BundleWriter:
        super().__enter__()
        try:
            with storage_errors(self.destination):
                (self.folder / GRAPHS).mkdir()
                self._weights = (self.folder / WEIGHTS).open("wb")
        except BaseException:
            super().__exit__(None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):  # its buffer, on a full disk; `finish_weights` has reported it
            self._weights.close()
        super().__exit__(kind)

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

    def stripes(self, bundle: Bundle, part: Stripes) -> str:
        """Write a slice of a whole bundle's weights; returns its SHA-256."""
        with reading_errors(bundle.weights_path), bundle.weights_path.open("rb") as file:
            for start, stop in part.pieces(0, bundle.manifest.weights_nbytes):
                file.seek(start)
                self._write(file.read(stop - start))
        _, sha256 = self.finish_weights()
        return sha256

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
            flush(self._weights.fileno())
        return self.offset, self._digest.hexdigest()

    def file(self, name: str, data: bytes) -> File:
        """Write a small file of the bundle."""
        path = self.folder / name
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            flush_path(path)
        return File(len(data), hashlib.sha256(data).hexdigest())

    def copy_files(self, bundle: Bundle) -> None:
        """Copy a bundle's graphs and tokenizer."""
        manifest = bundle.manifest
        for name in (*(graph.file for graph in manifest.graphs.values()), *manifest.files):
            with reading_errors(bundle.path / name):
                self.file(name, read_file(bundle.path / name))

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
        self.finish()
        return Bundle(self.destination, manifest, self.destination)


def write_slices(bundle: Bundle, count: int, output: Path, force: bool = False) -> list[Bundle]:
    """Cut a bundle into slices for so many machines: output/1-of-N to output/N-of-N.

    Each has 1/N of each block's weights, and all other files.

    Raises:
        BundleError: it is altered, or cannot be read.
        StorageError: a slice cannot be written.
        UsageError: the bundle is a slice or too small, or something is in the place of one.
    """
    bundle.require_whole()
    nbytes = bundle.manifest.weights_nbytes
    if count > (most := -(-nbytes // STRIPE)):
        raise UsageError(
            f"{bundle.path} has {format_bytes(nbytes)} of weights, which are divided in pieces of "
            f"{format_bytes(STRIPE)}: of {count} slices {count - most} would have none; "
            + (f"give --count {most} or fewer" if most > 1 else "it is too small to be cut")
        )
    bundle.verify()
    slices = []
    for number in range(1, count + 1):
        with BundleWriter(output / f"{number}-of-{count}", force) as writer:
            sha256 = writer.stripes(bundle, Stripes(number - 1, count))
            writer.copy_files(bundle)
            part = Slice(number, count, sha256)
            slices.append(writer.commit(msgspec.structs.replace(bundle.manifest, slice=part)))
    return slices
