"""Full-parameter MeZO with all weights in memory, as published: what offloading is compared with.

MeZO's Algorithm 1 (arXiv 2305.17333): theta is perturbed in place by +eps z, -2 eps z and +eps z,
with a whole forward pass after each of the first two, and then updated. So the noise of all
parameters is drawn four times a step. The weights are float32, whatever type the bundle stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from harness.peers.whole_model import plain_loss
from harness.peers.whole_model_full import MemoryWeights
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.protocol import StepLoss

TILE_VALUES = 1 << 19  # of a matrix that are perturbed at once


class InMemoryMeZO:
    """One direction a step; the kernels and the noise are those of the block-wise method."""

    def __init__(
        self,
        weights: MemoryWeights,
        models: Callable[[int], Model],
        adapters: Adapters,
        noise: RowNoise,
        epsilon: float,
    ) -> None:
        self.weights, self.models, self.adapters = weights, models, adapters
        self.noise, self.epsilon = noise, epsilon

    def step(self, number: int, rate: float, rows: Sequence[Sample]) -> StepLoss:
        """Update the weights; returns the summed loss at both points over twice the tokens."""
        model = self.models(max(len(row.inputs) for row in rows))
        self._move(number, self.epsilon)
        plus = plain_loss(model, self.adapters, rows)
        self._move(number, -2 * self.epsilon)
        minus = plain_loss(model, self.adapters, rows)
        self._move(number, self.epsilon)
        self._move(number, -rate * (plus - minus) / (2 * self.epsilon))
        tokens = sum(len(row.targets) for row in rows)
        return StepLoss((plus + minus) / 2 * tokens, 0, tokens)

    def _move(self, number: int, by: float) -> None:
        """theta + by z, in place."""
        for name, value in self.weights.tensors.items():
            height = max(1, TILE_VALUES // value.shape[1])
            for start in range(0, len(value), height):
                part = value[start : start + height]
                z = np.empty_like(part)
                self.noise.draw(number, 0, name, start, z)
                z *= np.float32(by)
                part += z
