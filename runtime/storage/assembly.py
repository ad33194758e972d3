"""Bytes of files that the workers hold in slices, assembled in memory before they are read.

A unit, such as the weights of a layer, is assembled whole, into one of two arenas: while the
current block computes, the other workers' parts of the next one arrive. All that is no unit, such
as a head, is read a tile at a time, and the tile that would be the next arrives meanwhile.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.core.stripes import ARENAS
from runtime.parallel.holders import Arrival, Holders

Octets = npt.NDArray[np.uint8]


class Key(NamedTuple):
    """A range of one version of a file."""

    file: int
    version: int
    start: int
    stop: int


@dataclass
class _Filling:
    """Memory for a range, which may still be arriving."""

    key: Key
    memory: mmap.mmap
    arrival: Arrival

    def part(self, start: int, stop: int) -> Octets:
        """Bytes start:stop of the file, once they are there."""
        self.arrival.wait()
        offset = start - self.key.start
        return np.frombuffer(self.memory, np.uint8, stop - start, offset)


class Assembly:
    """Files that are held in slices, whose units are assembled ahead if `prefetch` says so."""

    def __init__(self, holders: Holders, prefetch: bool) -> None:
        self.holders, self.prefetch = holders, prefetch
        self._units: dict[int, tuple[list[int], list[int]]] = {}  # starts and stops, by file
        self._arenas: list[_Filling] = []  # the current unit before one that was read ahead
        self._streams: dict[tuple[int, int], _Filling] = {}  # by file, and where the tensor ends
        self._largest = 0

    def open(
        self,
        file: int,
        path: Path,
        units: Iterable[tuple[int, int]],
        has: Callable[[int, int], bool] = lambda start, version: True,
    ) -> None:
        """Add a file, of which this worker's slice is at `path`; `units` are ranges of the whole.

        For `has` see `Holders.open`.
        """
        ordered = sorted(units)
        self._units[file] = [start for start, _ in ordered], [stop for _, stop in ordered]
        self._largest = max([self._largest, *(stop - start for start, stop in ordered)])
        self.holders.open(file, path, has)

    def view(self, file: int, version: int, start: int, stop: int, end: int) -> Octets:
        """Bytes start:stop of a version of a tensor that ends at `end`, until the next call."""
        key = Key(file, version, start, stop)
        unit = self._unit_at(key)
        if unit is not None:
            filling = self._in_arenas(unit)
            if filling is None:
                filling = self._assemble(unit)
                self._arenas.insert(0, filling)
            return filling.part(key.start, key.stop)
        stream = self._streams.pop((key.file, end), None)
        if stream is None or stream.key != key:
            stream = self._begin(key, mmap.mmap(-1, key.stop - key.start))
        octets = stream.part(key.start, key.stop)
        following = Key(*key[:2], key.stop, min(end, 2 * key.stop - key.start))
        if self.prefetch and following.start < following.stop:
            memory = mmap.mmap(-1, following.stop - following.start)
            self._streams[key.file, end] = self._begin(following, memory)
        return octets

    def rows(self, file: int, version: int, first: int, nbytes: int, rows: Iterable[int]) -> Octets:
        """Rows (N, nbytes) of a matrix whose row 0 begins at `first`."""
        ranges = [(first + row * nbytes, first + (row + 1) * nbytes) for row in rows]
        return self.ranges(file, version, ranges).reshape(len(ranges), nbytes)

    def ranges(self, file: int, version: int, ranges: Sequence[tuple[int, int]]) -> Octets:
        """The bytes of several ranges, one after another."""
        octets = np.empty(sum(stop - start for start, stop in ranges), np.uint8)
        self.holders.fetch(file, version, ranges, octets.data).wait()
        return octets

    def read_ahead(self, file: int, version: int, start: int, stop: int) -> None:
        """Begin to assemble what begins there, if it is a unit; nothing without `prefetch`."""
        unit = self._unit_at(Key(file, version, start, stop))
        if not self.prefetch or unit is None:
            return
        filling = self._in_arenas(unit)
        if filling is None:
            filling = self._assemble(unit)
        else:
            self._arenas.remove(filling)
        self._arenas.append(filling)  # to be there longer than the current one

    def release(self) -> None:
        """Free the tiles that nobody has read."""
        self._streams.clear()

    def forget(self) -> None:
        """Assemble all anew that is read from now on."""
        self._arenas.clear()
        self._streams.clear()

    def _unit_at(self, key: Key) -> Key | None:
        """The unit in which a range lies."""
        starts, stops = self._units[key.file]
        at = bisect_right(starts, key.start) - 1
        if at < 0 or key.stop > stops[at]:
            return None
        return Key(key.file, key.version, starts[at], stops[at])

    def _in_arenas(self, unit: Key) -> _Filling | None:
        return next((filling for filling in self._arenas if filling.key == unit), None)

    def _assemble(self, unit: Key) -> _Filling:
        """Begin to assemble a unit, in place of the one that comes first in the arenas."""
        if len(self._arenas) < ARENAS:
            return self._begin(unit, mmap.mmap(-1, self._largest))
        return self._begin(unit, self._arenas.pop(0).memory)  # what still arrives there comes first

    def _begin(self, key: Key, memory: mmap.mmap) -> _Filling:
        place = memoryview(memory)[: key.stop - key.start]
        ranges = [(key.start, key.stop)]
        return _Filling(key, memory, self.holders.fetch(key.file, key.version, ranges, place))
