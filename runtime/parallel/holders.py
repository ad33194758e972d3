"""The slices of files that the workers of a run hold: each sends the others what they ask for.

A worker asks when it needs bytes, whatever the others compute, so nothing depends on the order in
which they visit blocks. MPI's messages have one order for all and wait for each other. So each
worker has a connection to each other one by which it asks, and one by which it is asked.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from runtime.core.errors import BundleError, WorkerError
from runtime.core.files import read_into, reading_errors
from runtime.core.stripes import STRIPE, Stripes

ASK, RANGE = struct.Struct("<IIQ"), struct.Struct("<QQ")  # file, ranges, version; start, stop
MOST_RANGES = 1 << 16  # of one question; the server reads no more
REASON_S = 15.0  # in which the heartbeat says why a worker no longer answers

Range = tuple[int, int]


class Held(NamedTuple):
    """A file of which this worker has a slice; `has` says whether a version of bytes is there."""

    fd: int
    has: Callable[[int, int], bool]


class Arrival:
    """Bytes that have been asked for, and may still be on their way."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._problem: Exception | None = None

    def end(self, problem: Exception | None = None) -> None:
        """Tell that they are there, or why they will never be."""
        self._problem = problem
        self._ended.set()

    def wait(self) -> None:
        """Return once they are there, or raise why they are not."""
        self._ended.wait()
        if self._problem is not None:
            raise self._problem


class Holders:
    """The workers of a run, of which each holds the stripes that `slices` says, in rank order.

    `asked` are the connections by which others ask, `asking` those by which this worker does, by
    rank. Several may hold the same slice. One thread asks, one question after another, and counts
    the bytes that it receives in `received_bytes`.
    """

    def __init__(
        self,
        rank: int,
        slices: Sequence[Stripes],
        asking: Mapping[int, socket.socket],
        asked: Mapping[int, socket.socket],
    ) -> None:
        self.own = slices[rank]
        self.received_bytes = 0
        self._asking, self._asked = dict(asking), dict(asked)
        self._files: dict[int, Held] = {}
        self._stopped: Exception | None = None
        self._changed = threading.Condition()  # what the others can have, or `_stopped`
        self._ranks = {  # who is asked for each slice, not all the same where several hold it
            stripes: having[rank % len(having)]
            for stripes in dict.fromkeys(slices)
            if stripes != self.own
            and (having := [other for other, its in enumerate(slices) if its == stripes])
        }
        self._asked_for: SimpleQueue[tuple[Arrival, Callable[[], None]]] = SimpleQueue()
        for connection in (*self._asking.values(), *self._asked.values()):
            connection.settimeout(None)
            with suppress(OSError):  # no TCP between the processes of a test
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for connection in self._asked.values():
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        threading.Thread(target=self._ask, name="slices", daemon=True).start()

    def open(self, file: int, path: Path, has: Callable[[int, int], bool]) -> None:
        """Begin to send this worker's slice of a file, which lies at `path`.

        has(start, version): whether it has that version of the bytes from `start` on. Others wait
        until it has; `changed` lets them look again.
        """
        with reading_errors(path):
            self._files[file] = Held(os.open(path, os.O_RDONLY), has)
        self.changed()

    def changed(self) -> None:
        """Look again whether what others have asked for is there."""
        with self._changed:
            self._changed.notify_all()

    def fetch(self, file: int, version: int, ranges: Sequence[Range], out: memoryview) -> Arrival:
        """Begin to fill `out` with ranges of bytes of a file, one after another.

        Waiting for it raises WorkerError where a worker is gone, BundleError where this worker's
        slice cannot be read.
        """
        arrival = Arrival()
        self._asked_for.put((arrival, partial(self._fetch, file, version, ranges, out)))
        return arrival

    def stop(self, reason: Exception) -> None:
        """End all waiting for the others with this error."""
        self._stopped = self._stopped or reason
        self.changed()
        for connection in (*self._asking.values(), *self._asked.values()):
            with suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> None:
        while True:
            arrival, fetch = self._asked_for.get()
            try:
                fetch()
                arrival.end()
            except Exception as problem:  # raised where the bytes are used
                arrival.end(problem)
            del arrival, fetch

    def _fetch(self, file: int, version: int, ranges: Sequence[Range], out: memoryview) -> None:
        for first in range(0, len(ranges), MOST_RANGES):
            part = ranges[first : first + MOST_RANGES]
            nbytes = sum(stop - start for start, stop in part)
            self._fetch_part(file, version, part, out[:nbytes])
            out = out[nbytes:]

    def _fetch_part(
        self, file: int, version: int, ranges: Sequence[Range], out: memoryview
    ) -> None:
        question = ASK.pack(file, len(ranges), version)
        question += b"".join(RANGE.pack(*each) for each in ranges)
        places = {stripes: _places(stripes, ranges, out) for stripes in (self.own, *self._ranks)}
        rank = -1
        try:
            asked = [(stripes, r) for stripes, r in self._ranks.items() if places[stripes]]
            for _, rank in asked:
                self._asking[rank].sendall(question)
            self._read_own(file, ranges, places[self.own])
            for stripes, rank in asked:
                for place in places[stripes]:
                    self._receive(rank, place)
        except OSError as problem:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped is not None, REASON_S)
            raise self._stopped or WorkerError(
                f"rank {rank} no longer sends its slice of the weights: {problem}"
            ) from None

    def _receive(self, rank: int, place: memoryview) -> None:
        connection = self._asking[rank]
        self.received_bytes += len(place)
        while place:
            count = connection.recv_into(place)
            if count == 0:
                raise ConnectionError("its connection is closed")
            place = place[count:]

    def _read_own(self, file: int, ranges: Sequence[Range], places: list[memoryview]) -> None:
        left = iter(places)
        try:
            for each in ranges:
                at, end = self.own.portion(*each)
                while at < end:
                    place = next(left)
                    read_into(self._files[file].fd, at, place)
                    at += len(place)
        except OSError as problem:
            raise BundleError(f"this worker's slice cannot be read: {problem}") from None

    def _serve(self, connection: socket.socket) -> None:
        """Answer what one worker asks, until it ends; it sees an error as the end."""
        with suppress(OSError, EOFError), connection:
            while True:
                file, count, version = ASK.unpack(_exactly(connection, ASK.size))
                if count > MOST_RANGES:
                    return
                ranges = [*RANGE.iter_unpack(_exactly(connection, count * RANGE.size))]
                can_send = partial(self._can_send, file, version, ranges)
                with self._changed:
                    self._changed.wait_for(can_send)
                if self._stopped is not None:
                    return
                self._send(connection, self._files[file].fd, ranges)

    def _can_send(self, file: int, version: int, ranges: Sequence[Range]) -> bool:
        """Whether this worker has what is asked for, or will never have it."""
        held = self._files.get(file)
        return self._stopped is not None or (
            held is not None and all(held.has(start, version) for start, _ in ranges)
        )

    def _send(self, connection: socket.socket, fd: int, ranges: Sequence[Range]) -> None:
        small: list[bytes] = []
        with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
            for each in ranges:
                at, end = self.own.portion(*each)
                if end - at <= STRIPE:
                    small.append(os.pread(fd, end - at, at))
                    continue
                connection.sendall(b"".join(small))
                small.clear()
                connection.sendfile(file, at, end - at)
        connection.sendall(b"".join(small))


def _places(stripes: Stripes, ranges: Sequence[Range], out: memoryview) -> list[memoryview]:
    """The parts of `out` that a slice fills, in order, none of them empty."""
    places, offset = [], 0
    for start, stop in ranges:
        places += [out[offset + a : offset + b] for a, b in stripes.pieces(start, stop)]
        offset += stop - start
    return places


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            raise EOFError
        data += got
    return data
