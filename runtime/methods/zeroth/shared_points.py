"""The losses of a step's points that several workers compute: each some points, for some rows.

Workers are those of a grid, of which each has a fixed portion, or a fleet whose members come and
go (`runtime.parallel.fleet`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from runtime.methods.zeroth.estimator import Point
from runtime.parallel.workers import Workers

if TYPE_CHECKING:
    from runtime.parallel.fleet import Fleet


class Place(NamedTuple):
    """A group of rows at one point: what the objective sees together."""

    point: Point
    group: int  # counted over the step


Numbers = dict[Place, list[float]]  # each row's summed cross entropy, and the objective's summand
Compute = Callable[[Sequence[Place]], Numbers]


def of_grid(
    workers: Workers, points: Sequence[Point], lengths: Sequence[int], compute: Compute
) -> Numbers:
    """The numbers at all places, of which `compute` computes this worker's portion.

    lengths: how many numbers each group has at a point.
    """
    of_workers = [
        [Place(points[at], group) for at in portion.points for group in portion.groups]
        for portion in workers.portions(len(lengths), len(points))
    ]
    exchange = workers.exchange
    mine = of_workers[exchange.rank]
    own = compute(mine)
    counts = [sum(lengths[place.group] for place in places) for places in of_workers]
    received = iter(exchange.gather([number for place in mine for number in own[place]], counts))
    return {
        place: [*islice(received, lengths[place.group])]
        for places in of_workers
        for place in places
    }


def of_fleet(
    fleet: Fleet, step: int, places: Sequence[Place], lengths: Sequence[int], compute: Compute
) -> Numbers:
    """The numbers at all places, of which workers that come and go have computed some.

    lengths: how many numbers each group has at a point.
    """

    def of(items: Sequence[int]) -> list[list[float]]:
        numbers = compute([places[item] for item in items])
        return [numbers[places[item]] for item in items]

    numbers = fleet.share(step, [lengths[place.group] for place in places], of)
    return dict(zip(places, numbers, strict=True))
