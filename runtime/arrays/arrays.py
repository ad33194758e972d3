"""Elementwise work on evaluated arrays: in place by NumPy on a CPU, by MLX on a GPU.

On a CPU, NumPy changes MLX's arrays in place. Its loops are vector code, whereas MLX's CPU
backend computes one value at a time (0.6 ns a value for exp against 6 to 17, 0.1 to 0.5 for strided
copies against 0.7 to 1.4), and they need no further memory. MLX documents such views of its
arrays. An array that is changed must be evaluated, and no other array or view may share its memory.
Callers must use the returned array afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays import dequantize
from runtime.machine.backend import bounded_run_ahead

# no warnings about nan and infinity, as in MLX: the loss shows them
quiet = np.errstate(invalid="ignore", over="ignore")

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
PASSED = 2  # arrays as large as a result, by which MLX passes a bound: measured, see the log
SCRATCH_VALUES = 1 << 15  # of a product before it is added, which stay in a processor's cache


def view(x: mx.array) -> npt.NDArray[np.float32]:
    """The memory of x, evaluated, as a NumPy array."""
    return np.asarray(x)


@dataclass(frozen=True)
class Arrays:
    """The operations on arrays that kernels need besides matrix products, here by MLX, on a GPU.

    Sums have the type of `whole`, which may be bfloat16 on a GPU. Arrays are evaluated where
    holding both old and new would cost memory. Where an operation or a block is `one_evaluation`,
    nothing is evaluated before `finish`, whatever else is said: an evaluation takes 150 to 300 us,
    so a block that has a hundred of them spends more time on waiting than on arithmetic.
    """

    one_evaluation: bool = False

    def codes(self, words: mx.array, bits: int) -> mx.array:
        """The signed codes (R, C) of words (R, C*bits/32), see `dequantize.codes`."""
        return dequantize.lazy_codes(words, bits)

    def settle(self, *arrays: Any) -> None:
        """Evaluate arrays, or lists and dictionaries of them, so that others are freed."""
        if not self.one_evaluation:
            mx.eval(*arrays)

    def finish(self, *arrays: Any) -> None:
        """Evaluate all that an operation or a block leaves, where that is its one evaluation."""
        if self.one_evaluation:
            mx.eval(*arrays)

    def put(self, whole: mx.array, where: Any, part: mx.array) -> None:
        """whole[where] = part, evaluated."""
        whole[where] = part
        self.settle(whole)

    def add_to(self, whole: mx.array, where: Any, part: mx.array) -> None:
        """whole[where] += part, evaluated; `part` may be broadcast."""
        whole[...] = whole.at[where].add(part)  # in place: a slice that is held would be copied
        self.settle(whole)

    def add_rows(self, whole: mx.array, rows: npt.NDArray[np.int64], part: mx.array) -> None:
        """whole[rows] += part, evaluated, for distinct rows."""
        whole[...] = whole.at[mx.array(rows)].add(part)
        self.settle(whole)

    def add_repeated(self, whole: mx.array, rows: npt.NDArray[np.int64], part: mx.array) -> None:
        """The same for rows of which some may be equal; the sums do not depend on chance."""
        distinct = np.unique(rows)
        places = mx.array((distinct[:, None] == rows).astype(np.float32))
        self.add_rows(whole, distinct, places @ part)

    def add_product(
        self, whole: mx.array, where: Any, x: mx.array, of: Any, factor: mx.array
    ) -> None:
        """whole[where] += x[of] * factor, evaluated, for rows of (T, C) and a factor (C,)."""
        self.add_to(whole, where, x[of] * factor)

    def sum(self, whole: mx.array, part: mx.array) -> mx.array:
        """whole + part, which may be broadcast; `whole` is consumed."""
        return whole + part.astype(whole.dtype)

    def add_groups(self, whole: mx.array, part: mx.array) -> mx.array:
        """whole (T, C) + part (T, G), the same for all columns of a group; `whole` is consumed."""
        return whole + mx.repeat(part, whole.shape[1] // part.shape[1], axis=1)

    def group_sums(self, x: mx.array, groups: int) -> mx.array:
        """Sums of x (T, C) over each group of columns: (T, G)."""
        return x.reshape(x.shape[0], groups, -1).sum(axis=-1)

    def contiguous(self, x: mx.array, where: Any) -> mx.array:
        """A contiguous copy of x[where], evaluated."""
        part = mx.contiguous(x[where])
        self.settle(part)
        return part

    def apart(self, x: mx.array, others: Sequence[mx.array]) -> mx.array:
        """x, evaluated; a copy if it is a part of a larger one of `others`, which it would keep."""
        return x

    def row_max(self, x: mx.array) -> mx.array:
        """The largest of the last axis (..., n), as (..., 1), evaluated."""
        most = x.max(axis=-1, keepdims=True)
        self.settle(most)  # with x: else a copy of it lives beside the results of both
        return most

    def exp_below(self, x: mx.array, most: mx.array) -> mx.array:
        """e**(x - most) for x (..., n) and its upper bound `most` (..., 1); x is consumed."""
        return mx.exp(x - most)

    def weighed(self, x: mx.array, mean: mx.array, weights: mx.array, scale: float) -> mx.array:
        """(x - mean) * weights * scale for x, weights (..., n), mean (..., 1); x is consumed."""
        return (x - mean) * weights * scale

    def capped(self, x: mx.array, cap: float) -> mx.array:
        """cap tanh(x / cap), evaluated; x is consumed."""
        capped = mx.tanh(x / cap) * cap
        self.settle(capped)
        return capped

    def cap_slope(self, y: mx.array, cap: float) -> mx.array:
        """The slope 1 - (y / cap)**2 of `capped` where its values are y, a new array."""
        slope = 1 - (y / cap).square()
        self.settle(slope)
        return slope

    def times(self, x: mx.array, factor: mx.array) -> mx.array:
        """x times a factor of its shape; x is consumed."""
        return x * factor

    def evaluate(
        self, results: Sequence[mx.array], working_bytes: int = 0, within_plan: bool = False
    ) -> None:
        """Evaluate results one after another, with at most `working_bytes` in use besides them.

        Together, a later result's arrays would be allocated before an earlier one's are freed.
        MLX may take more where a single operation needs more; and with `within_plan` while all that
        is in use is less than is planned at the peak.
        """
        for result in results:
            self.settle(result)


class CpuArrays(Arrays):
    """Arrays changed in place with NumPy."""

    def codes(self, words: mx.array, bits: int) -> mx.array:
        return mx.array(dequantize.codes(np.asarray(words), bits))

    def settle(self, *arrays: Any) -> None:
        mx.eval(*arrays)

    def finish(self, *arrays: Any) -> None:
        """Nothing is left to evaluate."""

    def put(self, whole: mx.array, where: Any, part: mx.array) -> None:
        view(whole)[where] = view(part)

    @quiet
    def add_to(self, whole: mx.array, where: Any, part: mx.array) -> None:
        changed = view(whole)[where]
        np.add(changed, view(part), out=changed)

    @quiet
    def add_rows(self, whole: mx.array, rows: npt.NDArray[np.int64], part: mx.array) -> None:
        view(whole)[rows] += view(part)

    @quiet
    def add_repeated(self, whole: mx.array, rows: npt.NDArray[np.int64], part: mx.array) -> None:
        np.add.at(view(whole), rows, view(part))

    @quiet
    def add_product(
        self, whole: mx.array, where: Any, x: mx.array, of: Any, factor: mx.array
    ) -> None:
        changed, given, factors = view(whole)[where], view(x)[of], view(factor)
        step = max(1, SCRATCH_VALUES // factors.size)
        scratch = np.empty((min(step, len(given)), factors.size), np.float32)
        for start in range(0, len(given), step):
            rows = given[start : start + step]
            product = np.multiply(rows, factors, out=scratch[: len(rows)])
            np.add(changed[start : start + step], product, out=changed[start : start + step])

    def sum(self, whole: mx.array, part: mx.array) -> mx.array:
        self.add_to(whole, ..., part)
        return whole

    @quiet
    def add_groups(self, whole: mx.array, part: mx.array) -> mx.array:
        values = view(part)
        grouped = view(whole).reshape(*values.shape, -1)
        np.add(grouped, values[..., None], out=grouped)
        return whole

    @quiet
    def group_sums(self, x: mx.array, groups: int) -> mx.array:
        return mx.array(view(x).reshape(len(x), groups, -1).sum(axis=-1))

    def contiguous(self, x: mx.array, where: Any) -> mx.array:
        taken = view(x)[where]
        part = mx.zeros(taken.shape)
        mx.eval(part)
        view(part)[...] = taken
        return part

    def apart(self, x: mx.array, others: Sequence[mx.array]) -> mx.array:
        larger = [
            other for other in others if other.dtype == mx.float32 and other.nbytes > x.nbytes
        ]
        if any(np.may_share_memory(view(x), view(other)) for other in larger):
            return self.contiguous(x, ...)
        return x

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

    def capped(self, x: mx.array, cap: float) -> mx.array:
        values = view(x)
        np.divide(values, np.float32(cap), out=values)
        np.tanh(values, out=values)
        np.multiply(values, np.float32(cap), out=values)
        return x

    def cap_slope(self, y: mx.array, cap: float) -> mx.array:
        slope = mx.zeros(y.shape)
        mx.eval(slope)
        values = view(slope)
        np.divide(view(y), np.float32(cap), out=values)
        np.square(values, out=values)
        np.subtract(np.float32(1), values, out=values)
        return slope

    @quiet
    def times(self, x: mx.array, factor: mx.array) -> mx.array:
        values = view(x)
        np.multiply(values, view(factor), out=values)
        return x

    def evaluate(
        self, results: Sequence[mx.array], working_bytes: int = 0, within_plan: bool = False
    ) -> None:
        sizes = [result.nbytes for result in results]
        # MLX passes the bound by some operations: it compares before it allocates, and waits for
        # every tenth of its tasks alone
        passed = PASSED * max(sizes, default=0)
        with bounded_run_ahead(max(sum(sizes) + working_bytes - passed, 0), within_plan):
            for result in results:
                mx.eval(result)


def arrays_for(device: str, one_evaluation: bool = False) -> Arrays:
    """The implementation for "cpu" or "gpu"; there more than an array may be one evaluation."""
    return Arrays(one_evaluation) if device == "gpu" else CpuArrays()


def row_sums(x: mx.array) -> mx.array:
    """Sums over the last axis (..., n), as (..., 1)."""
    return x @ mx.ones((x.shape[-1], 1))
