"""A process that says which MLX, BLAS and device there are, and how fast they compute.

It is a process of its own because a library that does not fit the processor ends it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from runtime.machine.backend import (
    automatic_device,
    gpu_name,
    mlx_version,
    prepare,
    use_device,
)
from runtime.machine.openblas import blas_threads

PREPARED = prepare()

import mlx.core as mx  # noqa: E402

from runtime.arrays.arrays import arrays_for  # noqa: E402
from runtime.arrays.dequantize import dequantize  # noqa: E402
from runtime.arrays.weight_source import QuantizedTile  # noqa: E402
from runtime.machine.compute_dtype import choose  # noqa: E402

ROUNDS = 7
DEVICE = automatic_device()


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few rounds, after one that is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def speeds() -> dict[str, float]:
    """Products in float32, dequantizing of 4-bit weights, and exponentials, on MLX's device."""
    arrays = arrays_for(DEVICE)
    size, rows, columns = 1024, 2048, 1024
    a, b = mx.random.normal((size, size)), mx.random.normal((size, size))
    words = mx.zeros((rows, columns // 8), mx.uint32)
    tile = QuantizedTile(words, mx.ones((rows, columns // 64)), None)
    x, top = mx.random.normal((rows, columns)), mx.full((rows, 1), 9.0)
    mx.eval(a, b, tile.words, tile.scales, x, top)
    return {
        "float32 products, GFLOP/s": 2e-9 * size**3 / _seconds(lambda: a @ b),
        "dequantized 4-bit weights, G/s": 1e-9
        * rows
        * columns
        / _seconds(lambda: dequantize(tile, 4, arrays)),
        "exponentials, G/s": 1e-9 * rows * columns / _seconds(lambda: arrays.exp_below(x, top)),
    }


if __name__ == "__main__":
    use_device(DEVICE)
    facts = {
        "mlx": mlx_version(),
        "device": DEVICE,
        "gpu": gpu_name(),
        "nvidia": mx.cuda.is_available(),
        "tf32": os.environ["MLX_ENABLE_TF32"],
        "blas": PREPARED.blas,
        "warning": PREPARED.warning,
        "threads": blas_threads(),
        "speeds": speeds(),
        "products": asdict(choose("auto", DEVICE, DEVICE == "gpu")),
    }
    print(json.dumps(facts))
    sys.exit(0)
