"""The type of products with frozen weights: as asked, or bfloat16 where it is faster here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.core.errors import UsageError
from runtime.machine.onednn import OneDnn, share_cores

FASTER = 1.15  # times the rate of float32, from which on `auto` takes bfloat16
TOKENS, COLUMNS, ROWS = 256, 896, 256  # of a product that is measured: one slice of a small model
REPEATS = 9


@dataclass(frozen=True)
class ComputeDtype:
    """A type, and why it is taken."""

    name: Literal["float32", "bfloat16"]
    reason: str


def choose(
    asked: str, device: str, packed: bool, load_library: Callable[[str], OneDnn] | None
) -> ComputeDtype:
    """The type for "float32", "bfloat16" or "auto", which takes bfloat16 where it is faster.

    Without a way to load the library, as for another machine, it is taken to be there.

    Raises:
        UsageError: bfloat16 was asked for, and is not available.
    """
    if asked == "float32":
        return ComputeDtype("float32", "as is usual")
    try:
        if device == "gpu":
            raise UsageError(
                "--compute-dtype bfloat16 is built for processors, not for GPUs, whose values and "
                "graphs are float32; give float32"
            )
        if packed:
            raise UsageError(
                "--compute-dtype bfloat16 multiplies dequantized tiles; leave out --arithmetic "
                "packed, or give float32"
            )
        library = None if load_library is None else load_library("--compute-dtype bfloat16")
    except UsageError as problem:
        if asked == "bfloat16":
            raise
        return ComputeDtype("float32", str(problem).removeprefix("--compute-dtype "))
    if asked == "bfloat16" or library is None:
        return ComputeDtype("bfloat16", "as asked")
    rates = measure(library)
    text = f"{rates.bfloat16:.0f} GFLOP/s in bfloat16, {rates.float32:.0f} in float32"
    return ComputeDtype("bfloat16" if rates.faster else "float32", text)


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of products in both types, the best of some repeats."""

    float32: float
    bfloat16: float

    @property
    def faster(self) -> bool:
        """Whether bfloat16 is faster beyond what measuring may be wrong by."""
        return self.bfloat16 >= FASTER * self.float32


def measure(library: OneDnn) -> Rates:
    """The rates here and now, in some milliseconds."""
    import numpy as np

    y = np.zeros((TOKENS, ROWS), np.float32)
    rates = []
    share_cores(True)
    for dtype in (np.float32, np.uint16):
        x, w = np.ones((TOKENS, COLUMNS), dtype), np.ones((ROWS, COLUMNS), dtype)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            library.multiply(x, w.T, y, add=True)
            seconds.append(time.perf_counter() - began)
        rates.append(2e-9 * TOKENS * COLUMNS * ROWS / min(seconds))
    return Rates(*rates)
