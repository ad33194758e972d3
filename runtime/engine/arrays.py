"""Elementwise work on evaluated arrays, chosen once for a device: in place on a CPU, anew on a GPU.

On a CPU NumPy's loops change MLX's arrays where they lie: they are vector code where MLX's CPU
backend takes one value at a time (0.6 ns a value for exp against 6 to 17, 0.1 to 0.5 for strided
copies against 0.7 to 1.4), and they need no memory of their own. MLX documents such views of its
arrays. What is changed must be evaluated, and nobody else may hold it, nor a view of it; callers go
on with what is returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# as in MLX, what is no number any more is no reason to warn: the loss tells
quiet = np.errstate(invalid="ignore", over="ignore")


def view(x: mx.array) -> npt.NDArray[np.float32]:
    """The memory of x, evaluated."""
    return np.asarray(x)


class Arrays(Protocol):
    """What kernels do with arrays besides matrix products."""

    def put(self, whole: mx.array, where: Any, part: mx.array) -> None:
        """whole[where] = part, evaluated."""

    def add_to(self, whole: mx.array, where: Any, part: mx.array) -> None:
        """whole[where] += part, evaluated; `part` may be broadcast."""

    def contiguous(self, x: mx.array, where: Any) -> mx.array:
        """x[where] in memory of its own, evaluated."""

    def row_max(self, x: mx.array) -> mx.array:
        """The largest of the last axis (..., n), kept as (..., 1), evaluated."""

    def exp_below(self, x: mx.array, most: mx.array) -> mx.array:
        """e**(x - most) of x (..., n) and what it never exceeds, (..., 1); x is consumed."""

    def weighed(self, x: mx.array, mean: mx.array, weights: mx.array, scale: float) -> mx.array:
        """(x - mean) * weights * scale of x and weights (..., n), mean (..., 1); x is consumed."""

    def both(
        self, first: Callable[[], mx.array], second: Callable[[], mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Two results that do not depend on each other, side by side where that pays."""


class _Streams(threading.local):
    """MLX's streams belong to the thread that made them."""

    @cached_property
    def second(self) -> mx.Stream:
        return mx.new_stream(mx.cpu)


_streams = _Streams()


class CpuArrays:
    """With NumPy, where the arrays lie."""

    def put(self, whole: mx.array, where: Any, part: mx.array) -> None:
        view(whole)[where] = view(part)

    @quiet
    def add_to(self, whole: mx.array, where: Any, part: mx.array) -> None:
        changed = view(whole)[where]
        np.add(changed, view(part), out=changed)

    def contiguous(self, x: mx.array, where: Any) -> mx.array:
        taken = view(x)[where]
        part = mx.zeros(taken.shape)
        mx.eval(part)
        view(part)[...] = taken
        return part

    def row_max(self, x: mx.array) -> mx.array:
        return mx.array(view(x).max(axis=-1, keepdims=True))

    @quiet
    def exp_below(self, x: mx.array, most: mx.array) -> mx.array:
        # relative error 2.0e-7 at worst, seen on x86-64 with AVX-512; MLX's own: 4e-6
        values = view(x)
        np.subtract(values, view(most), out=values)
        np.exp(values, out=values)
        return x

    @quiet
    def weighed(self, x: mx.array, mean: mx.array, weights: mx.array, scale: float) -> mx.array:
        values = view(x)
        np.subtract(values, view(mean), out=values)
        np.multiply(values, view(weights), out=values)
        np.multiply(values, np.float32(scale), out=values)
        return x

    def both(
        self, first: Callable[[], mx.array], second: Callable[[], mx.array]
    ) -> tuple[mx.array, mx.array]:
        one = first()
        with mx.stream(_streams.second):
            other = second()
        mx.eval(one, other)
        return one, other


class GpuArrays:
    """With MLX's own operations, evaluated where holding both old and new would cost memory."""

    def put(self, whole: mx.array, where: Any, part: mx.array) -> None:
        whole[where] = part
        mx.eval(whole)

    def add_to(self, whole: mx.array, where: Any, part: mx.array) -> None:
        whole[where] = whole[where] + part
        mx.eval(whole)

    def contiguous(self, x: mx.array, where: Any) -> mx.array:
        part = mx.contiguous(x[where])
        mx.eval(part)
        return part

    def row_max(self, x: mx.array) -> mx.array:
        most = x.max(axis=-1, keepdims=True)
        mx.eval(most)  # with x: else a copy of it lives beside what comes of both
        return most

    def exp_below(self, x: mx.array, most: mx.array) -> mx.array:
        return mx.exp(x - most)

    def weighed(self, x: mx.array, mean: mx.array, weights: mx.array, scale: float) -> mx.array:
        return (x - mean) * weights * scale

    def both(
        self, first: Callable[[], mx.array], second: Callable[[], mx.array]
    ) -> tuple[mx.array, mx.array]:
        return first(), second()


def arrays_for(device: str) -> Arrays:
    """What works on "cpu" or "gpu"."""
    return GpuArrays() if device == "gpu" else CpuArrays()
