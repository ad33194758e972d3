"""Momentum of low-rank estimates, kept as a factor of its own instead of whole matrices.

LOZO-M (arXiv 2410.07698). With U_t (M, r) and V_k (N, r) the factors of step t's direction, of
which V_k stays for an interval of steps, c the estimate along U_t V_k^T, b the decay, w the weight
decay, and F (M, r) the momentum, zeros at first, for a matrix theta (M, N):

    F <- F V_j^T V_k / N                  where V_j of the update before was another one
    F <- b F + (1 - b) (c / r) U_t
    theta <- theta - rate (F V_k^T + w theta)

E[V V^T] is r I, and E[V^T V] is N I: the first line projects the momentum onto the new factor.
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


class FactorDescent(Descent):
    """Each step follows the momentum; F lies where the caller says."""

    optimizer = "sgd"
    scratch_copies = 4  # theta, the step, and the factors, which are smaller

    def __init__(
        self,
        decay: float,
        rank: int,
        shapes: Mapping[str, tuple[int, ...]],
        factors: MutableMapping[str, mx.array],
    ) -> None:
        """`factors` will hold F by tensor; all of `shapes` begin as zeros in it."""
        self.factor_decay = decay
        self._shapes = self.factors_of(shapes, rank)
        self._factors = factors
        for tensor, shape in self._shapes.items():
            factors[tensor] = mx.zeros(shape)
        self._step: int | None = None  # of the latest update
        self._before: int | None = None  # of the one before

    @staticmethod
    def factors_of(shapes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor's F."""
        return {tensor: (rows, rank) for tensor, (rows, _) in shapes.items()}

    def remember(self, update: Update) -> None:
        if len(update.gradients) != 1:
            raise ValueError(f"{len(update.gradients)} directions in a step, not 1")
        self._latest = update
        self._before, self._step = self._step, update.step

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """See `Descent.apply`; the tensor's F changes with it."""
        latest, decay = self._latest, self.factor_decay
        u, v = noise.factors(latest.step, 0, tensor, value.shape)
        factor = self._factors[tensor]
        if self._before is not None and not noise.same_interval(self._before, latest.step):
            _, old = noise.factors(self._before, 0, tensor, value.shape)
            factor = factor @ (old.T @ v / value.shape[1])
        factor = factor * decay + u * (latest.gradients[0] * (1 - decay))
        mx.eval(factor)
        self._factors[tensor] = factor
        value = value - (factor @ v.T + value * latest.weight_decay) * latest.rate
        mx.eval(value)
        return value

    def state(self) -> dict[str, Any]:
        return {"latest": self._step}

    def restore(self, facts: Mapping[str, Any]) -> None:
        latest = facts["latest"]
        if latest is not None and (type(latest) is not int or latest < 0):
            raise ValueError(f"its latest update is that of step {latest!r:.80}")
        self._step = latest

    def write(self, file: IO[bytes]) -> None:
        """Append F after a line feed: float32 values, tensor after tensor."""
        file.write(b"\n")
        for tensor in self._shapes:
            file.write(np.array(self._factors[tensor], copy=False).tobytes())

    def read(self, file: IO[bytes]) -> None:
        for tensor, shape in self._shapes.items():
            found = np.frombuffer(file.read(math.prod(shape) * 4), np.float32)
            if not np.isfinite(found).all():
                raise ValueError(f"its momentum for {tensor} holds values that are not finite")
            self._factors[tensor] = mx.array(found).reshape(shape)  # ValueError if there is less
        super().read(file)
