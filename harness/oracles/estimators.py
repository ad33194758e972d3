"""The zeroth-order estimators as their papers print them: whole adapters, one forward per loss.

Each is a transcription of its equations that knows nothing of blocks, lanes, deferred updates or
logs. The losses are those of the bundle's own kernels, and theta is never restored by subtraction,
so the methods in `runtime.methods` can be compared with these bit for bit.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from harness.oracles.reference import plain_loss
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.protocol import Sample


class Monolithic(ABC):
    """An estimator on whole adapters, which it changes in place."""

    def __init__(self, adapters: Adapters, seed: int, epsilon: float, weight_decay: float) -> None:
        self.adapters, self.seed = adapters, seed
        self.epsilon, self.weight_decay = epsilon, weight_decay

    @abstractmethod
    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        """Change the adapters by one step."""

    def direction(self, number: int, query: int, name: str) -> mx.array:
        """z of one tensor: Gaussian, drawn anew in each step."""
        return Noise(self.seed).draw(number, query, name, self.adapters.tensors[name].shape)

    def loss(
        self, model: Model, rows: Sequence[Sample], number: int, query: int, by: float
    ) -> float:
        """The mean loss at theta + by z."""
        theta = self.adapters.tensors
        tensors = {name: theta[name] + self.direction(number, query, name) * by for name in theta}
        moved = Adapters(self.adapters.manifest, tensors, self.adapters.dtype)
        return plain_loss(model, moved, rows)

    def projected(self, model: Model, rows: Sequence[Sample], number: int, query: int) -> float:
        """SPSA's (loss(theta + eps z) - loss(theta - eps z)) / (2 eps)."""
        plus = self.loss(model, rows, number, query, self.epsilon)
        minus = self.loss(model, rows, number, query, -self.epsilon)
        return (plus - minus) / (2 * self.epsilon)

    def descend(self, number: int, rate: float, weights: Sequence[float]) -> None:
        """theta <- theta - rate (sum of weight z over the queries + weight_decay theta)."""
        for name, theta in self.adapters.tensors.items():
            update = theta * self.weight_decay
            for query, weight in enumerate(weights):
                update = update + self.direction(number, query, name) * weight
            self.adapters.tensors[name] = theta - update * rate
        mx.eval(self.adapters.tensors)


class MonolithicFZOO(Monolithic):
    """FZOO with N directions of signs (arXiv 2506.09034)."""

    N = 8

    def direction(self, number: int, query: int, name: str) -> mx.array:
        shape = self.adapters.tensors[name].shape
        return Noise(self.seed, "rademacher").draw(number, query, name, shape)

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        l0 = plain_loss(model, self.adapters, rows)
        l = [self.loss(model, rows, number, i, self.epsilon) for i in range(self.N)]  # noqa: E741
        sigma = statistics.stdev(l)
        G = [(loss - l0) / (self.epsilon * sigma) / self.N for loss in l]
        self.descend(number, rate, G)
