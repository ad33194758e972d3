"""Descent along the orthogonal factor of an estimate of the gradient in a subspace, as Muon's.

With P (M, k) an orthonormal basis of a random subspace, Psi_i (k, N) noise, g_i the differences of
the losses along P Psi_i, and w the weight decay, for a matrix theta (M, N):

    G = (1/n) sum_i g_i Psi_i
    theta <- theta - rate (P msign(G) + w theta)

msign(G) is U V^T of G = U S V^T. As in Muon, five steps of a Newton-Schulz iteration, whose
polynomial is steep at 0, bring the singular values into about 0.7 to 1.2.
"""

from __future__ import annotations

import mlx.core as mx

from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent
from runtime.methods.zeroth.scalar_update import Update

STEPS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ZETA = 1e-7


class MuonDescent(Descent):
    """Each estimate on its own, with all its singular values made about 1."""

    optimizer = "sgd"
    scratch_copies = 6  # theta, G and Psi, and in msign X, a product and their sum
    muon = True

    def remember(self, update: Update) -> None:
        self._latest = update

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        latest = self._latest
        estimate: mx.array | None = None
        for query, gradient in enumerate(latest.gradients):
            psi = noise.coordinates(latest.step, query, tensor, value.shape)
            part = psi * (gradient / len(latest.gradients))
            estimate = part if estimate is None else estimate + part
            mx.eval(estimate)  # so that no more than one direction is in memory
        assert estimate is not None, "an update without directions"
        step = noise.subspace(latest.step, tensor, value.shape) @ msign(estimate)
        value = value - (step + value * latest.weight_decay) * latest.rate
        mx.eval(value)
        return value


def msign(matrix: mx.array) -> mx.array:
    """About U V^T of a matrix U S V^T; zeros of zeros."""
    a, b, c = POLYNOMIAL
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (mx.linalg.norm(x) + ZETA)
    for _ in range(STEPS):
        square = x @ x.T
        x = x * a + (square * b + (square @ square) * c) @ x
        mx.eval(x)
    return x.T if tall else x
