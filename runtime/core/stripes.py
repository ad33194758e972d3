"""A file that several machines hold together, each the stripes of its own number.

Stripe j has the bytes from j * STRIPE on, and belongs to slice j % count. So each machine has an
equal part of every block of weights, and its part of any range lies together in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SLICES = 1 << 10
WEIGHTS_FILE, SLOTS_FILE = 0, 1  # the numbers of the files that are held so
ARENAS = 2  # for the current block and the next, which a worker assembles
STRIPE = 1 << 16  # bytes; small beside a block, large beside a message


@dataclass(frozen=True)
class Stripes:
    """The stripes of slice `index`, counted from 0, of `count`; (0, 1) are all of a file."""

    index: int = 0
    count: int = 1

    def before(self, position: int) -> int:
        """How many of the file's first `position` bytes are in the slice."""
        rounds, rest = divmod(position, STRIPE * self.count)
        return rounds * STRIPE + min(max(rest - self.index * STRIPE, 0), STRIPE)

    def portion(self, start: int, stop: int) -> tuple[int, int]:
        """Where the slice's part of bytes start:stop of the file begins and ends in the slice."""
        return self.before(start), self.before(stop)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of bytes start:stop of the file that the slice has, relative to `start`."""
        if self.count == 1:
            return [(0, stop - start)]
        period = STRIPE * self.count
        first = start // period * period + self.index * STRIPE
        places = range(first, stop, period)
        pairs = ((max(place, start), min(place + STRIPE, stop)) for place in places)
        return [(begin - start, end - start) for begin, end in pairs if begin < end]
