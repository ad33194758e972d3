"""The part in which zeroth-order methods differ: the points of a step, and the estimate.

An estimator names the points at which a step evaluates its batch, and turns the losses found there
into one number for each direction z: the estimate of the gradient is the mean over the directions
of that number times z. `runtime.methods.zeroth.zeroth_order` does everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from runtime.methods.log_header import Part


class Point(NamedTuple):
    """theta + sign eps z, with z of the step's direction `query`; theta itself where sign is 0."""

    query: int
    sign: float


class Lane(NamedTuple):
    """One hidden state between blocks: a row at one point."""

    point: Point
    row: int


LANE_BYTES = 640  # of a hidden state's place in the lists of a step, and its losses

PLUS, MINUS, UNPERTURBED = 1.0, -1.0, 0.0
THETA = Point(0, UNPERTURBED)  # evaluated once, beside the first direction

Losses = Mapping[Point, float]  # the batch's mean loss at each point


def by_query(points: Sequence[Point]) -> list[list[Point]]:
    """The points of each query."""
    return [list(of_query) for _, of_query in groupby(points, key=lambda point: point.query)]


def projected_gradient(plus: float, minus: float, epsilon: float) -> float:
    """SPSA's estimate along z from the mean losses at theta + eps z and theta - eps z."""
    return (plus - minus) / (2 * epsilon)


class Estimator(Part, ABC):
    """How a step's losses become one number per direction; all state is a few scalars."""

    @property
    @abstractmethod
    def points(self) -> Sequence[Point]:
        """The points that a step evaluates, in the order of the queries, which count from 0."""

    def lanes(self, rows: int) -> list[Lane]:
        """The hidden states of a step, query after query: each row at each point."""
        return [
            Lane(point, row)
            for points in by_query(self.points)
            for row in range(rows)
            for point in points
        ]

    @property
    @abstractmethod
    def compared(self) -> Sequence[tuple[Point, Point]]:
        """Pairs of points whose losses are all equal only if epsilon is too small."""

    @abstractmethod
    def gradients(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        """One number per query, by which its direction is multiplied. All losses are finite."""

    def extras(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        """Further numbers of the losses that the descent needs, for the step's update."""
        return ()

    @classmethod
    def trains(cls, tensor: str) -> bool:
        """Whether it moves a tensor of the adapters."""
        return True
