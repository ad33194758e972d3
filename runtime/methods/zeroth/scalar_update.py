"""Updates described by a few scalars: steps along noise that is drawn again, never stored.

Each step of a zeroth-order method is its learning rate and one projected gradient per direction
(MeZO, section 2.1: storage-efficient zeroth-order optimization), and what else the descent needs.
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
    extras: tuple[float, ...] = ()  # what they are, the descent says

    @property
    def record(self) -> list[Any]:
        """Its line in the trajectory log."""
        extras = [list(self.extras)] if self.extras else []
        return [self.rate, list(self.gradients), *extras]

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
