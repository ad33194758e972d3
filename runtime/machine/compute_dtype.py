"""The type of products with frozen weights: as asked, or bfloat16 where it is faster here.

On a GPU it is the type of hidden values too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.core.errors import UsageError
from runtime.machine.onednn import OPTION, OneDnn
from runtime.machine.openblas import share_cores

FASTER = 1.15  # times the rate of float32, from which on `auto` takes bfloat16
TOKENS, COLUMNS, ROWS = 256, 896, 256  # of a product that is measured: one slice of a small model
REPEATS = 9
GPU_ROWS, TOGETHER = 4864, 4  # of a product on a GPU, and how many are measured at once


@dataclass(frozen=True)
class ComputeDtype:
    """A type, and why it is taken."""

    name: Literal["float32", "bfloat16"]
    reason: str


def choose(
    asked: str, device: str, packed: bool, load_library: Callable[[], OneDnn] | None
) -> ComputeDtype:
    """The type for "float32", "bfloat16" or "auto", which takes bfloat16 where it is faster.

    Without a way to load the library, as for another machine, it is taken to be there. A GPU needs
    none.

    Raises:
        UsageError: bfloat16 was asked for, and is not available.
    """
    if asked == "float32":
        return ComputeDtype("float32", "as is usual")
    try:
        if packed and device == "cpu":
            raise UsageError(
                f"{OPTION} multiplies dequantized tiles; leave out --arithmetic packed, or give "
                "float32"
            )
        library = None
        if device == "cpu" and load_library is not None:
            library = load_library()
    except UsageError as problem:
        if asked == "bfloat16":
            raise
        return ComputeDtype("float32", str(problem).removeprefix("--compute-dtype "))
    if asked == "bfloat16" or load_library is None:
        return ComputeDtype("bfloat16", "as asked")
    rates = measure_gpu() if library is None else measure(library)
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
    """The rates here and now, in some milliseconds: of the BLAS, and of oneDNN."""
    import mlx.core as mx
    import numpy as np

    x, w, y = (np.ones(shape) for shape in ((TOKENS, COLUMNS), (ROWS, COLUMNS), (TOKENS, ROWS)))
    floats = mx.array(x), mx.array(w)
    bits, sums = [values.astype(np.uint16) for values in (x, w)], y.astype(np.float32)
    share_cores(False)
    float32 = _rate(lambda: mx.eval(floats[0] @ floats[1].T))
    share_cores(True)
    return Rates(float32, _rate(lambda: library.multiply(bits[0], bits[1].T, sums, add=True)))


def _rate(multiply: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - began)
    return 2e-9 * TOKENS * COLUMNS * ROWS / min(seconds)


def measure_gpu() -> Rates:
    """The rates of a GPU's products with packed weights, forward and backward, here and now."""
    import mlx.core as mx

    rates = []
    with mx.stream(mx.gpu):
        packed, *others = mx.quantize(mx.ones((GPU_ROWS, COLUMNS)), group_size=64, bits=4)
        for dtype in (mx.float32, mx.bfloat16):
            x, y = (mx.ones((TOKENS, width), dtype) for width in (COLUMNS, GPU_ROWS))
            scales, biases = (values.astype(dtype) for values in others)
            mx.eval(x, y, packed, scales, biases)
            seconds = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                products = [
                    mx.quantized_matmul(given, packed, scales, biases, transpose=given is x)
                    for given in (x, y) * TOGETHER
                ]
                mx.eval(products)  # together, since a GPU is waited for
                seconds.append(time.perf_counter() - began)
            rates.append(4e-9 * TOGETHER * TOKENS * COLUMNS * GPU_ROWS / min(seconds))
    mx.clear_cache()
    return Rates(*rates)
