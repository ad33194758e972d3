"""Weights in 16 or 32 bits on disk, and how float32 values are rounded to them.

They are rounded up or down at random, with probabilities that make the mean exact, so that updates
smaller than half a step are not lost; in float16 down to 6e-5, the smallest normal number, and
below that to the nearest value.
"""

from __future__ import annotations

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


def rounded(values: F32, dtype: str, integers: U16 | int = 0) -> Octets:
    """The bytes of values (R, C) in a stored type.

    `integers` (R, C) are uniform and decide the direction; values that the type has need none.
    Values that are too large become infinite.
    """
    if dtype == "float32":
        return values.copy().reshape(-1).view(np.uint8)
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        high = (bits + integers) >> np.uint32(16)
        return high.astype(np.uint16).reshape(-1).view(np.uint8)
    moved = (bits + (integers & _F16_DROPPED)) & ~_F16_DROPPED
    with np.errstate(over="ignore"):
        return moved.view(np.float32).astype(np.float16).reshape(-1).view(np.uint8)
