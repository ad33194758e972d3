"""Descent along directions in a cone around the momentum, an average of earlier estimates.

With m the momentum, all zeros at first, |m| its norm over all d trained values, u_i the noise of
the n queries, a the angle, b the decay and w the weight decay:

    z_i = cos(a) sqrt(d) m / |m| + sin(a) u_i          (u_i while m is zero)
    G = (1/n) sum_i g_i z_i
    theta <- theta - rate (G + w theta)
    m <- b m + (1 - b) G

m has the size of the adapters, and lies where the caller says. |m| is over all tensors, so an
update must reach all of them before the next direction is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import IO, Any

import mlx.core as mx
import numpy as np

from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent
from runtime.methods.zeroth.scalar_update import Update


class ConeDescent(Descent):
    """Each estimate of the gradient on its own, and the momentum around which directions lie."""

    optimizer = "sgd"
    scratch_copies = 5  # theta, m, the estimate, a direction and what it is made of
    at_once = True

    def __init__(
        self,
        angle: float,
        decay: float,
        shapes: Mapping[str, tuple[int, ...]],
        momentum: MutableMapping[str, mx.array],
    ) -> None:
        """`momentum` will hold m by tensor; all of `shapes` become zeros in it."""
        self.cone = (angle, decay)
        self._shapes, self._momentum = dict(shapes), momentum
        for tensor, shape in shapes.items():
            momentum[tensor] = mx.zeros(shape)
        self._size = sum(math.prod(shape) for shape in shapes.values())
        self._square = 0.0  # |m|^2, of the tensors that the latest update has reached
        self._latest_square = 0.0  # |m|^2 before the latest update

    def remember(self, update: Update) -> None:
        self._latest = update
        self._latest_square, self._square = self._square, 0.0

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """A direction in the cone, whose noise is z."""
        return self._direction(tensor, z, self._square)

    def _direction(self, tensor: str, z: mx.array, square: float) -> mx.array:
        if square == 0:
            return z
        angle, _ = self.cone
        along = math.cos(angle) * math.sqrt(self._size / square)
        return self._momentum[tensor] * along + z * math.sin(angle)

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """See `Descent.apply`; the tensor's m changes with it."""
        latest, (_, decay) = self._latest, self.cone
        estimate = mx.zeros(value.shape)
        for query, g in enumerate(latest.gradients):
            z = noise.draw(latest.step, query, tensor, value.shape)
            z = self._direction(tensor, z, self._latest_square)
            estimate = estimate + z * (g / len(latest.gradients))
            mx.eval(estimate)  # so that no more than one direction is in memory
        m = self._momentum[tensor] * decay + estimate * (1 - decay)
        mx.eval(m)
        self._momentum[tensor] = m
        self._square += _square_of(m)
        value = value - (estimate + value * latest.weight_decay) * latest.rate
        mx.eval(value)
        return value

    def state(self) -> dict[str, Any]:
        return {"square": self._square}

    def restore(self, facts: Mapping[str, Any]) -> None:
        square = float(facts["square"])
        if not 0 <= square < math.inf:
            raise ValueError(f"the square of its momentum is {square}")
        self._square = square

    def write(self, file: IO[bytes]) -> None:
        """Append m after a line feed: float32 values, tensor after tensor."""
        file.write(b"\n")
        for tensor in self._shapes:
            file.write(np.array(self._momentum[tensor], copy=False).tobytes())

    def read(self, file: IO[bytes]) -> None:
        square = 0.0
        for tensor, shape in self._shapes.items():
            found = np.frombuffer(file.read(math.prod(shape) * 4), np.float32)
            m = mx.array(found).reshape(shape)  # ValueError if there is less
            square += _square_of(m)
            self._momentum[tensor] = m
        if square != self._square:
            raise ValueError(f"the square of its momentum is {square}, not {self._square}")
        super().read(file)


def _square_of(m: mx.array) -> float:
    """The sum of the squares, in float64 and in an order that is the same on all machines."""
    return float(np.square(np.array(m, copy=False), dtype=np.float64).sum())
