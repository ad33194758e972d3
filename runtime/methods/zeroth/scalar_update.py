"""Updates described by a few scalars: steps along noise that is drawn again, never stored.

Each step of a zeroth-order method is its learning rate and one projected gradient per direction
(MeZO, section 2.1: storage-efficient zeroth-order optimization), and with methods that estimate the
Hessian one second difference besides. Where layers have scales, those of a step that measured them
are there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from runtime.methods.noise import Noise


@dataclass(frozen=True)
class Update:
    """One step's update: theta <- theta - rate (mean over queries of g z + weight_decay theta)."""

    step: int
    rate: float
    gradients: tuple[float, ...]  # projected, one per query
    weight_decay: float
    curvatures: tuple[float, ...] = ()  # second differences, one per query, or none
    scales: tuple[float, ...] = ()  # one per layer, if this step has measured them

    @property
    def record(self) -> list[Any]:
        """Its line in the trajectory log."""
        more = [list(found) for found in (self.curvatures, self.scales) if found]
        return [self.rate, list(self.gradients), *more]

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """The tensor after the update, evaluated."""
        total = value * self.weight_decay
        for query, gradient in enumerate(self.gradients):
            z = noise.draw(self.step, query, tensor, value.shape)
            total = total + z * (gradient / len(self.gradients))
            mx.eval(total)  # so that no more than one direction is in memory
        value = value - total * self.rate
        mx.eval(value)
        return value

    def estimate(self, noise: Noise, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """The estimate of the tensor's gradient: the mean over the queries of g z."""
        total = mx.zeros(shape)
        for query, gradient in enumerate(self.gradients):
            z = noise.draw(self.step, query, tensor, shape)
            total = total + z * (gradient / len(self.gradients))
            mx.eval(total)
        return total


def projected_gradient(plus: float, minus: float, epsilon: float) -> float:
    """SPSA's estimate along z from the mean losses at theta + eps z and theta - eps z."""
    return (plus - minus) / (2 * epsilon)
