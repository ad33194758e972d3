"""The parts that all peers' processes share: options, measurements, and the file of results.

A peer is measured by the same meter as ours (`runtime.machine.footprint`): the peak while it loads,
and the peak of each step. Invariant: unless it is killed, it writes one JSON file that holds either
its measurements or the reason why there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.machine.footprint import Meter

RANK, ALPHA, LEARNING_RATE = 8, 16.0, 1e-4
# variables that libraries read at their import; `runtime.machine.backend.prepare` sets PREPARED
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
PREPARED = ("OPENBLAS_CORETYPE", "MLX_BFS_MAX_WIDTH")
LIBRARIES = ("OMP_", "OPENBLAS_", "MKL_", "MLX_", "VECLIB_")
REASON_CHARS = 300


class Steps:
    """The steps of a process: seconds, loss and peak footprint of each."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.loading_peak_bytes = 0
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.losses: list[float] = []

    def begin(self) -> None:
        """The model is loaded; training starts."""
        self.loading_peak_bytes = self._meter.peak_bytes
        self._meter.reset_peak()

    def end(self, seconds: float, loss: float) -> None:
        """A step has ended."""
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.peaks.append(self._meter.peak_bytes)
        self._meter.reset_peak()

    @contextmanager
    def step(self) -> Iterator[list[float]]:
        """Time a step; its body appends the loss to the list."""
        losses: list[float] = []
        start = time.perf_counter()
        yield losses
        self.end(time.perf_counter() - start, losses[0])

    def to_json(self) -> dict[str, Any]:
        """The measurements; `peak_rss_bytes` is the kernel's peak, which counts file pages too."""
        return {
            "step_s": self.seconds,
            "step_peak_bytes": self.peaks,
            "training_peak_bytes": max(self.peaks),
            "peak_footprint_bytes": max(self.loading_peak_bytes, *self.peaks),
            "peak_rss_bytes": self._meter.peak_rss_bytes,
            "losses": self.losses,
        }


Train = Callable[[argparse.Namespace, Steps], dict[str, Any]]
Options = Callable[[argparse.ArgumentParser], object]


def main(purpose: str | None, train: Train, options: Options) -> int:
    """Run a peer with the options of its command line.

    train: runs the steps and returns further facts.  options: adds the peer's own options.
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options(parser)
    arguments = parser.parse_args()
    try:
        with Meter() as meter:
            steps = Steps(meter)
            facts = train(arguments, steps)
        measured = {**steps.to_json(), **facts, "environment": environment()}
    except ImportError as problem:
        name = (problem.name or str(problem)).partition(".")[0]
        return _failed(arguments.result, f"{name} cannot be imported by {sys.executable}")
    except Exception as problem:
        _failed(arguments.result, f"{type(problem).__name__}: {problem}")
        raise
    arguments.result.write_text(json.dumps(measured))
    return 0


def token_rows(vocabulary: int, steps: int, tokens: int) -> npt.NDArray[np.int64]:
    """Random tokens (steps, tokens + 1), of which `tokens` are predicted in each step."""
    return np.random.default_rng(0).integers(vocabulary, size=(steps, tokens + 1))


def let_mlx_compile() -> None:
    """As for who uses mlx-lm: loading a class of ours has turned that off."""
    import mlx.core as mx

    if not os.environ.get("MLX_DISABLE_COMPILE"):
        mx.enable_compile()


def environment() -> dict[str, str]:
    """The variables that control threads, BLAS and run-ahead, where they are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(LIBRARIES)}


def versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of installed distributions."""
    return {name: metadata.version(name) for name in names}


def _failed(result: Path, reason: str) -> int:
    text = " ".join(reason.split())
    result.write_text(json.dumps({"failed": text[:REASON_CHARS]}))
    return 1
