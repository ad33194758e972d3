"""What the workers of a run tell each other: numbers and bytes, the same on all of them afterwards.

Every worker calls the same methods in the same order; each call waits for all the others. Float64
values travel as their bytes, so every worker computes with the same bits.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import mlx.core as mx
import numpy as np

PIECE_VALUES = 1 << 16  # of an array that is summed piece by piece


class Exchange(ABC):
    """`size` workers, of which this is number `rank`, counted from 0.

    sent_bytes: of this worker's messages so far. waited_s: in which it has waited for the others.
    """

    rank: int
    size: int
    sent_bytes: int = 0
    waited_s: float = 0.0

    def all_bytes(self, message: bytes) -> list[bytes]:
        """The messages of all workers in rank order; all are of one length."""
        with self._waiting(len(message)):
            return self._all_bytes(message)

    @abstractmethod
    def _all_bytes(self, message: bytes) -> list[bytes]:
        """See `all_bytes`."""

    @contextmanager
    def _waiting(self, sent_bytes: int) -> Iterator[None]:
        """Count what is sent, and the time until all have it."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - begun
            if self.size > 1:  # else nobody receives it
                self.sent_bytes += sent_bytes

    def gather(self, values: Sequence[float], counts: Sequence[int]) -> list[float]:
        """The float64 values of all workers in rank order, NaNs and zeros with their signs.

        Worker r gives `counts[r]` values; all workers know all counts.

        Raises:
            ValueError: this worker gives another number of values.
        """
        if len(values) != counts[self.rank]:
            raise ValueError(f"{len(values)} values of worker {self.rank}, not as {counts} says")
        most = max(counts)
        padded = struct.pack(f"<{most}d", *values, *[0.0] * (most - len(values)))
        messages = self.all_bytes(padded)
        return [
            value
            for message, count in zip(messages, counts, strict=True)
            for value in struct.unpack_from(f"<{count}d", message)
        ]

    def add(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The sums of all workers' float32 arrays of these shapes, the same bits on every worker.

        They may be computed until `await_sums` returns; meanwhile others may compute.
        """
        joined = b"".join(np.array(array, copy=False).tobytes() for array in arrays)
        messages = self.all_bytes(joined)
        total = np.frombuffer(messages[0], np.float32).copy()
        for message in messages[1:]:
            total += np.frombuffer(message, np.float32)
        return split(mx.array(total), arrays)

    def add_in_place(self, array: mx.array) -> mx.array:
        """The sum of all workers' float32 arrays of this shape (R, C), in the memory of this one.

        Piece by piece: a copy of the whole, as `add` makes, may be larger than all else in memory.
        """
        array = mx.contiguous(array, allow_col_major=True)
        values = np.array(array, copy=False)
        long = values if values.flags.c_contiguous else values.T  # with rows that are contiguous
        step = max(1, PIECE_VALUES // long.shape[1])
        for start in range(0, len(long), step):
            (piece,) = sums = self.add([mx.array(long[start : start + step])])
            self.await_sums(sums)
            long[start : start + step] = np.array(piece, copy=False)
        return array

    def await_sums(self, sums: Sequence[mx.array]) -> None:
        """Wait for the sums that `add` has begun."""
        mx.eval(*sums)

    def broadcast(self, message: bytes) -> bytes:
        """The message of rank 0, of any length; those of other workers are not read."""
        (length,) = struct.unpack("<Q", self.all_bytes(struct.pack("<Q", len(message)))[0])
        return self.all_bytes(message if self.rank == 0 else bytes(length))[0]

    def texts(self, text: str) -> list[str]:
        """The texts of all workers in rank order, of any lengths."""
        own = text.encode()
        lengths = [
            struct.unpack("<Q", length)[0] for length in self.all_bytes(struct.pack("<Q", len(own)))
        ]
        padded = self.all_bytes(own.ljust(max(lengths), b"\0"))
        return [each[:length].decode() for each, length in zip(padded, lengths, strict=True)]


def split(joined: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """The parts of joined values (N,) that have the shapes of these arrays."""
    ends = [*accumulate(array.size for array in like)]
    parts = mx.split(joined, ends[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, like, strict=True)]


class Alone(Exchange):
    """The only worker of a run."""

    rank, size = 0, 1

    def _all_bytes(self, message: bytes) -> list[bytes]:
        return [message]
