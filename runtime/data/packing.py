"""Which rows share a sequence, so that little of it is padding.

Rows are taken in the order of the first epoch, WINDOW of them at a time. In each window the longest
row comes first, and goes where it leaves the least room (best fit, decreasing). No row is divided
and none is left out. Which rows share a sequence depends on the lengths and the seed alone, and
stays the same in every epoch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.data.token_rows import Lengths, order

WINDOW = 4096  # rows among which those that fit together are looked for


class PackingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences that packing has made of a file's rows.

    length: the tokens that a sequence may hold. most_rows: in one sequence. padding: the share of
    padding in the computed tokens; unpacked_padding: the same of the rows, each by itself. A
    sequence or a row is padded to the bundle's smallest length that holds it.
    """

    rows: int
    sequences: int
    length: int
    most_rows: int
    padding: float
    unpacked_padding: float

    def describe(self) -> str:
        """A line for people."""
        sequences = f"{self.sequences} sequence{'s' if self.sequences > 1 else ''}"
        return (
            f"packed: {self.rows} rows in {sequences} of up to {self.length} tokens, "
            f"{self.rows / self.sequences:.1f} rows in each and at most {self.most_rows}; "
            f"{self.padding:.1%} of what is computed is padding (unpacked: "
            f"{self.unpacked_padding:.1%})"
        )


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences of up to `bucket` tokens: the numbers of their rows, one sequence after another.

    The rows of sequence i are `members[offsets[i] : offsets[i + 1]]`.
    """

    bucket: int
    members: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows_of(self, sequence: int) -> list[int]:
        """The numbers of a sequence's rows."""
        rows: list[int] = self.members[self.offsets[sequence] : self.offsets[sequence + 1]].tolist()
        return rows

    def lengths(self, lengths: Lengths) -> Lengths:
        """The tokens of each sequence, given those of each row."""
        return np.add.reduceat(lengths[self.members], self.offsets[:-1])

    def report(self, lengths: Lengths, buckets: Sequence[int]) -> PackingReport:
        """The report for rows of these lengths."""
        return PackingReport(
            rows=len(self.members),
            sequences=len(self),
            length=self.bucket,
            most_rows=int(np.diff(self.offsets).max()),
            padding=_padding(self.lengths(lengths), buckets),
            unpacked_padding=_padding(lengths, buckets),
        )


def pack(lengths: Lengths, bucket: int, seed: int) -> Packing:
    """Pack rows of these lengths (n,), none longer than `bucket`, into sequences."""
    ordered = order(seed, 0, len(lengths))
    if len(ordered) == 0 or int(lengths.max()) > bucket:
        raise ValueError(f"{len(ordered)} rows do not go into sequences of {bucket} tokens")
    members, counts = np.empty_like(ordered), array("i")
    for at in range(0, len(ordered), WINDOW):
        window = ordered[at : at + WINDOW]
        sequences = _best_fit(lengths[window].tolist(), bucket)
        members[at : at + WINDOW] = window[[place for sequence in sequences for place in sequence]]
        counts.extend(map(len, sequences))
    return Packing(bucket, members, np.cumsum([0, *counts]).astype(np.int32))


def _best_fit(lengths: Sequence[int], bucket: int) -> list[list[int]]:
    """The places of lengths in sequences, ascending; sequences are in the order of their first."""
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room of each sequence, ascending, and its number
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fitting = bisect_left(rooms, (lengths[place], 0))
        if fitting == len(rooms):
            room, number = bucket, len(sequences)
            sequences.append([])
        else:
            room, number = rooms.pop(fitting)
        sequences[number].append(place)
        insort(rooms, (room - lengths[place], number))
    return sorted(map(sorted, sequences))


def _padding(lengths: Lengths, buckets: Sequence[int]) -> float:
    """The share of padding where each sequence is padded to the smallest bucket that holds it."""
    edges = np.array(buckets)
    computed = int(edges[np.searchsorted(edges, lengths)].sum())
    return 1 - int(lengths.sum()) / computed
