"""Trained weights on disk: two slots for each block, written in turn, so that one is always whole.

A slot is a header and the block's tensors. The header says how many steps the tensors have seen,
and holds the SHA-256 of each tensor and of itself. It is written last. A slot that a kill or a
power failure has torn does not agree with its checksums, and the other slot of its block is older
by one write. The file has its full size from the beginning, so that a full disk is an error at the
start.

Where several workers hold the weights in slices, each writes its slice of every tensor, with the
headers after that, and reads tensors from an assembly. Such a file is good for one process only.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.core.files import (
    flush,
    read_into,
    reading_errors,
    require_file,
    reserve,
    storage_errors,
)
from runtime.core.stripes import SLOTS_FILE, Stripes
from runtime.storage.background import QUEUED, Background

if TYPE_CHECKING:
    from runtime.storage.assembly import Assembly

MAGIC = b"ondevice slot 1\n"
DIGEST_BYTES = 32
ALIGNMENT = 64
HASH_BYTES = 1 << 20  # read at once to check a slot
Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its block's slot."""

    offset: int
    nbytes: int


class Whole(NamedTuple):
    """A slot, 0 or 1, and how many steps its tensors have seen."""

    slot: int
    version: int


class SlotLayout:
    """Where the tensors of one block lie in a slot; `tensors` are their names and bytes."""

    def __init__(self, tensors: Mapping[str, int]) -> None:
        self.header_bytes = len(MAGIC) + 8 + DIGEST_BYTES * (len(tensors) + 1)
        end = self.header_bytes
        self.places: dict[str, Place] = {}
        for name, nbytes in tensors.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.places[name] = Place(start, nbytes)
            end = start + nbytes
        self.nbytes = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


class Slots:
    """The file of all slots. Writes happen in order, in a thread of their own.

    `identity` says whose weights these are: slots with another one count as torn. Without
    `writable` the file must be there, and is only read. With an `assembly` this worker has a slice
    of the file, of which `units` are the blocks that are assembled whole.
    """

    def __init__(
        self,
        path: Path,
        layouts: Sequence[SlotLayout],
        identity: bytes,
        writable: bool = True,
        assembly: Assembly | None = None,
        units: Sequence[int] = (),
    ) -> None:
        self.path, self.layouts, self.identity = path, layouts, identity
        self._assembly = assembly
        self._stripes = Stripes() if assembly is None else assembly.holders.own
        self._finished: dict[int, int] = {}  # the version of a slot of this process, by its start
        self._starts = [0]
        for layout in layouts:
            self._starts.append(self._starts[-1] + 2 * layout.nbytes)
        self._slot_starts = [
            start + slot * layout.nbytes
            for start, layout in zip(self._starts, layouts, strict=False)
            for slot in (0, 1)
        ]
        self._headers = [self._stripes.before(self._starts[-1])]  # of a slice, two for each block
        for layout in layouts:
            self._headers.append(self._headers[-1] + 2 * layout.header_bytes)
        self._digests: dict[tuple[int, str], Any] = {}
        self._of_uncut: dict[tuple[int, str], Any] = {}  # where workers hold slices
        self._uncut: dict[tuple[int, int], bytes] = {}
        if not writable:
            with reading_errors(path):
                require_file(path)
                self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, self._fd)
            return
        with storage_errors(path):
            if path.exists():
                require_file(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link could lead anywhere
            self._fd = os.open(path, flags, 0o666)
            weakref.finalize(self, os.close, self._fd)
            reserve(self._fd, self.nbytes)
        self._writer = Background("write-back", partial(storage_errors, path), QUEUED)
        if assembly is not None:
            extents = [self.extent(block, slot) for block in units for slot in (0, 1)]
            assembly.open(SLOTS_FILE, path, extents, self._has)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._starts[-1] if self._assembly is None else self._headers[-1]

    def extent(self, block: int, slot: int) -> tuple[int, int]:
        """Where a block's slot 0 or 1 begins and ends in the file."""
        size = self.layouts[block].nbytes
        start = self._starts[block] + slot * size
        return start, start + size

    def read(self, block: int, slot: int, tensor: str, start: int, out: Octets) -> None:
        """Fill `out` with the bytes of a tensor from byte `start` on.

        Raises:
            BundleError: the file cannot be read.
        """
        offset = self._offset(block, slot, tensor) + start
        if self._assembly is not None:
            version, stop = self._version_here(block, slot), offset + out.size
            end = self._offset(block, slot, tensor) + self.layouts[block].places[tensor].nbytes
            out[:] = self._assembly.view(SLOTS_FILE, version, offset, stop, end)
            return
        with reading_errors(self.path):
            read_into(self._fd, offset, out.data)

    def read_rows(
        self, block: int, slot: int, tensor: str, rows: Sequence[int], out: Octets
    ) -> None:
        """Fill `out` (N, bytes of a row) with rows of a tensor.

        Raises:
            BundleError: the file cannot be read.
        """
        first = self._offset(block, slot, tensor)
        if self._assembly is not None:
            version = self._version_here(block, slot)
            out[:] = self._assembly.rows(SLOTS_FILE, version, first, out.shape[1], rows)
            return
        with reading_errors(self.path):
            for row, place in zip(rows, out, strict=True):
                read_into(self._fd, first + row * out.shape[1], place.data)

    def read_ahead(self, block: int, slot: int) -> None:
        """Begin to assemble a block, where workers hold it in slices."""
        if self._assembly is not None:
            version = self._version_here(block, slot)
            self._assembly.read_ahead(SLOTS_FILE, version, *self.extent(block, slot))

    def write(self, block: int, slot: int, tensor: str, start: int, data: Octets) -> None:
        """Write bytes of a tensor, from `start` on; a tensor is written once, from its beginning.

        The array must not change until `drain`. Returns before it is written.

        Raises:
            StorageError: an earlier write failed.
        """
        if start == 0:
            self._digests[block, tensor] = hashlib.sha256()
            if self._assembly is not None:
                self._of_uncut[block, tensor] = hashlib.sha256()
        uncut = self._of_uncut.get((block, tensor))
        digest, offset = self._digests[block, tensor], self._offset(block, slot, tensor) + start

        def work() -> None:
            if uncut is not None:
                uncut.update(data.data)
            at = self._stripes.before(offset)
            for first, last in self._stripes.pieces(offset, offset + data.size):
                _write(self._fd, at, data[first:last])
                digest.update(data[first:last].data)
                at += last - first

        self._writer.put(work)

    def finish(self, block: int, slot: int, version: int) -> None:
        """Write the header of a slot of which all tensors have been written, and wait for it.

        `version` is how many steps its tensors have seen.

        Raises:
            StorageError: something could not be written.
        """
        digests = [self._digests.pop((block, name)) for name in self.layouts[block].places]
        start, _ = self.extent(block, slot)
        place = self._header_at(block, slot)

        def work() -> None:
            header = self._header(version, [digest.digest() for digest in digests])
            _write(self._fd, place, np.frombuffer(header, np.uint8))

        self._writer.put(work)
        self.drain()
        if self._assembly is not None:
            uncut = [self._of_uncut.pop((block, name)) for name in self.layouts[block].places]
            self._uncut[block, slot] = b"".join(digest.digest() for digest in uncut)
            self._finished[start] = version
            self._assembly.holders.changed()

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            StorageError: something could not be.
        """
        self._writer.drain()

    def sync(self) -> None:
        """Flush the file to the disk."""
        self.drain()
        with storage_errors(self.path):
            flush(self._fd)

    def newest(self, block: int, most: int) -> Whole | None:
        """The newest whole slot of a block that has seen at most `most` steps; None without one.

        There is none of an earlier process where workers hold slices: others may not have theirs.

        Raises:
            BundleError: the file cannot be read.
        """
        if self._assembly is not None:
            return None
        with reading_errors(self.path):
            slots = [Whole(slot, self._version(block, slot)) for slot in (0, 1)]
            slots = [whole for whole in slots if 0 < whole.version <= most]
            for whole in sorted(slots, key=lambda whole: whole.version, reverse=True):
                if self._agrees(block, whole.slot):
                    return whole
        return None

    def digest(self, block: int, slot: int) -> bytes:
        """The SHA-256 of each tensor of a whole slot, as it was written, one after the other.

        Where workers hold slices, it is that of the tensors before they were cut.
        """
        if self._assembly is not None:
            return self._uncut[block, slot]
        return b"".join(_digests_in(self._read_header(block, slot)))

    def _has(self, start: int, version: int) -> bool:
        """Whether this worker has written its slice of the slot at `start` in that version."""
        at = bisect_right(self._slot_starts, start) - 1
        written = self._finished.get(self._slot_starts[at], 0)
        if written > version:
            raise AssertionError(f"version {version} of a slot is asked for after {written}")
        return written == version

    def _version_here(self, block: int, slot: int) -> int:
        return self._finished[self.extent(block, slot)[0]]

    def _header_at(self, block: int, slot: int) -> int:
        if self._assembly is None:
            return self.extent(block, slot)[0]
        return self._headers[block] + slot * self.layouts[block].header_bytes

    def _read_header(self, block: int, slot: int) -> bytes:
        header = np.empty(self.layouts[block].header_bytes, np.uint8)
        read_into(self._fd, self._header_at(block, slot), header.data)
        return header.tobytes()

    def _version(self, block: int, slot: int) -> int:
        """The version in the header of a slot; 0 if it is none of these weights."""
        data = self._read_header(block, slot)
        version = int(struct.unpack_from("<Q", data, len(MAGIC))[0])
        return version if data == self._header(version, _digests_in(data)) else 0

    def _agrees(self, block: int, slot: int) -> bool:
        """Whether all tensors of a slot agree with the checksums in its header."""
        start, _ = self.extent(block, slot)
        expected = _digests_in(self._read_header(block, slot))
        buffer = np.empty(HASH_BYTES, np.uint8)
        for place, own in zip(self.layouts[block].places.values(), expected, strict=True):
            digest = hashlib.sha256()
            for at in range(0, place.nbytes, HASH_BYTES):
                part = buffer[: min(HASH_BYTES, place.nbytes - at)]
                read_into(self._fd, start + place.offset + at, part.data)
                digest.update(part.data)
            if digest.digest() != own:
                return False
        return True

    def _header(self, version: int, digests: Sequence[bytes]) -> bytes:
        plain = MAGIC + struct.pack("<Q", version) + b"".join(digests)
        return plain + hashlib.sha256(self.identity + plain).digest()

    def _offset(self, block: int, slot: int, tensor: str) -> int:
        return self.extent(block, slot)[0] + self.layouts[block].places[tensor].offset


def _digests_in(header: bytes) -> list[bytes]:
    """The SHA-256 of each tensor that a header holds."""
    data = header[len(MAGIC) + 8 : -DIGEST_BYTES]
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


def _write(fd: int, offset: int, data: Octets) -> None:
    left = data.data
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count
