"""Weights in 16 or 32 bits on disk, and how float32 values are rounded to them.

"nearest" rounds to the nearest value, ties to even. "stochastic" rounds up or down with
probabilities that make the mean exact, so that updates smaller than half a step are not lost; for
float16 it does so down to 6e-5, the smallest normal number, and rounds to the nearest below that.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Octets = npt.NDArray[np.uint8]
_F16_DROPPED = np.uint32(0x1FFF)  # the bits of a float32's mantissa that float16 lacks


def expand(stored: Octets, dtype: str, out: F32) -> None:
    """The float32 values of stored bytes; `out` has their shape."""
    flat = out.reshape(-1)
    if dtype == "bfloat16":
        bits = flat.view(np.uint32)
        bits[...] = stored.view(np.uint16)
        np.left_shift(bits, 16, out=bits)
    else:
        flat[...] = stored.view(np.float16 if dtype == "float16" else np.float32)


def rounded(values: F32, dtype: str, integers: U16 | None) -> Octets:
    """The bytes of values (R, C) in a stored type, rounded to the nearest without `integers`.

    Values that are too large become infinite. `integers` (R, C) are uniform and decide the
    direction.
    """
    if dtype == "float32":
        return values.copy().reshape(-1).view(np.uint8)
    if integers is None:
        return _nearest(values, dtype)
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        high = (bits + integers) >> np.uint32(16)
        return high.astype(np.uint16).reshape(-1).view(np.uint8)
    moved = (bits + (integers & _F16_DROPPED)) & ~_F16_DROPPED
    return _nearest(moved.view(np.float32), dtype)


def _nearest(values: F32, dtype: str) -> Octets:
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).reshape(-1).view(np.uint8)
    short = mx.array(values).astype(mx.bfloat16).view(mx.uint16)
    mx.eval(short)
    return np.array(short).reshape(-1).view(np.uint8)
