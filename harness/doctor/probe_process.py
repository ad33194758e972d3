"""A process that says which MLX, BLAS and device there are, and how fast they compute.

It is a process of its own because a library that does not fit the processor ends it.
"""

from __future__ import annotations

import json
import sys

from harness.bench.speeds_process import speeds
from runtime.machine.backend import blas_threads, mlx_version, prepare

if __name__ == "__main__":
    import mlx.core as mx

    found = prepare()
    gpu = mx.is_available(mx.gpu)
    facts = {
        "mlx": mlx_version(),
        "device": "gpu" if gpu else "cpu",
        "blas": found.blas,
        "warning": found.warning,
        "threads": blas_threads(),
        "speeds": speeds(),
    }
    print(json.dumps(facts))
    sys.exit(0)
