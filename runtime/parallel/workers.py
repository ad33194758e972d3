"""The grid of a run's workers, and which rows and points of a step each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from runtime.core.errors import UsageError
from runtime.parallel.exchange import Alone, Exchange

if TYPE_CHECKING:
    from runtime.parallel.fleet import Fleet

AGREE_STEPS = 20  # between comparisons of the adapters
EVEN = 0.8  # of the fastest worker's speed: slower ones have smaller portions


class Portion(NamedTuple):
    """The work of one worker in a step: each of its groups of rows at each of its points."""

    groups: range
    points: range


@dataclass(eq=False)
class Workers:
    """The grid of a run's workers: perturbation parallelism inside, data parallelism outside.

    Worker `data_rank * perturb + perturb_rank` has the rows of `data_rank` and, of the points at
    which a method evaluates them, those of `perturb_rank`. All workers know all rows. `speeds`, one
    for each worker, make the portions uneven; without them all are alike. `passes` counts the
    forward passes of this worker: a row at a point. `fleet` are workers that come and go, of a
    process that has no others.
    """

    exchange: Exchange = field(default_factory=Alone)
    data: int = 1
    perturb: int = 1
    speeds: tuple[float, ...] = ()
    passes: int = 0
    fleet: Fleet | None = None

    def __post_init__(self) -> None:
        """Check the grid.

        Raises:
            UsageError: it is for another number of workers.
        """
        size = self.exchange.size
        if self.data * self.perturb != size:
            raise UsageError(
                f"data={self.data},perturb={self.perturb} is a grid of "
                f"{self.data * self.perturb} workers, and {size} are there; start as many as the "
                "grid has, or give another grid"
            )
        if self.speeds and (len(self.speeds) != size or min(self.speeds) <= 0):
            raise ValueError(f"{self.speeds} are no speeds of {size} workers")

    def balance(self, speeds: Sequence[float]) -> None:
        """Make the portions as uneven as the speeds; even where these are about the same."""
        fastest = max(speeds)
        shown = tuple(max(0.01, round(speed / fastest, 2)) for speed in speeds)
        self.speeds = shown if min(shown) < EVEN else ()

    def portions(self, groups: int, points: int = 1) -> list[Portion]:
        """The portion of each worker, in rank order, of a step of so many groups and points.

        A step of fewer groups or points gives no worker more of them.
        """
        speeds = self.speeds or (1.0,) * self.exchange.size
        grid = [speeds[at : at + self.perturb] for at in range(0, len(speeds), self.perturb)]
        return [
            Portion(of_groups, of_points)
            for of_groups, own in zip(shares(groups, [*map(sum, grid)]), grid, strict=True)
            for of_points in shares(points, own)
        ]

    def mine(self, groups: int, points: int = 1) -> Portion:
        """The portion of this worker."""
        return self.portions(groups, points)[self.exchange.rank]

    def check(self, groups: int, points: int, together: int = 1) -> None:
        """Return if every worker has something to do in a step; a group is `together` rows.

        Raises:
            UsageError: some would have nothing.
        """
        if self.data > groups:
            of = f"groups of {together} rows" if together > 1 else "rows"
            raise UsageError(
                f"data={self.data}: so many workers cannot share the {groups} {of} of a step; give "
                f"a --batch-size that has {self.data} or more, or fewer workers"
            )
        if self.perturb > points:
            raise UsageError(
                f"perturb={self.perturb}: so many workers cannot share the {points} forward passes "
                f"of each row; give perturb={points} or less, or more --queries"
            )


def shares(count: int, speeds: Sequence[float]) -> list[range]:
    """Neighbours of `count` items for each worker, so that the last one ends as early as it can.

    Each has one before any has two. Equal workers have numbers that differ by at most one.
    """
    counts = [0] * len(speeds)
    for _ in range(count):
        after = [(have > 0, (have + 1) / speed) for have, speed in zip(counts, speeds, strict=True)]
        counts[after.index(min(after))] += 1
    return [range(first, end) for first, end in pairwise([0, *accumulate(counts)])]
