"""The reference of experts: every expert over every token, of which the chosen ones count."""

from __future__ import annotations

import mlx.core as mx


def experts(
    x: mx.array, weights: mx.array, chosen: mx.array, gate: mx.array, up: mx.array, down: mx.array
) -> mx.array:
    """y (T, D) of x (T, C), weights and chosen (T, k), gate and up (E, W, C), down (E, D, W)."""
    total = mx.zeros((x.shape[0], down.shape[1]))
    for number in range(gate.shape[0]):
        weight = mx.where(chosen == number, weights, 0).sum(axis=-1, keepdims=True)
        g, u = x @ gate[number].T, x @ up[number].T
        total = total + weight * ((g * mx.sigmoid(g) * u) @ down[number].T)
    return total
