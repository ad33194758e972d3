"""exp, off the scalar path: MLX's CPU `exp` runs one value at a time, its `power` does not."""

from __future__ import annotations

import math

import mlx.core as mx


def exp(x: mx.array) -> mx.array:
    """e**x to about 1e-6 relative for x <= 0; the plain one on a GPU."""
    if mx.default_device() == mx.Device(mx.gpu):
        return mx.exp(x)
    return mx.power(mx.array(math.e, dtype=mx.float32), x)
