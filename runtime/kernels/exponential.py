"""exp and row sums, fast and to the last bits of float32.

MLX's CPU `exp` runs one value at a time; its `power` is three times as fast. float32's e is short
of e by a factor exp(3.04e-8), so e**x is mended by (1 + 3.04e-8 x): relative error 1.4e-7 down to
x = -30, where MLX's own `exp` has 1.8e-6. MLX's `sum` adds in order and loses 3e-6 over a
vocabulary chunk; a product with ones keeps 2e-7.
"""

from __future__ import annotations

import math

import mlx.core as mx

E32 = 2.7182817459106445  # float32(e)
SHORT = math.log(math.e / E32)


def exp(x: mx.array) -> mx.array:
    """e**x for x <= 0; the plain one on a GPU."""
    if mx.default_device() == mx.Device(mx.gpu):
        return mx.exp(x)
    return mx.power(mx.array(E32, dtype=mx.float32), x) * (1 + mx.maximum(x, -100) * SHORT)


def row_sums(x: mx.array) -> mx.array:
    """Sums over the last axis (..., n), kept as (..., 1)."""
    return x @ mx.ones((x.shape[-1], 1))
