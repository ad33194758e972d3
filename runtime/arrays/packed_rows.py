"""A few rows of values times packed weights where they lie, by code that LLVM has compiled.

MLX multiplies packed weights on a CPU one value at a time, after they were copied out of the map.
Here all cores read them from the map, by the processor's widest instructions. Values and sums are
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.arrays.compiled_dequantize import HALVES, UNPACK
from runtime.arrays.stored import Matrix
from runtime.machine.machine_code import compile_all, function

Floats = npt.NDArray[np.float32]
Stored = tuple[npt.NDArray[Any], ...]
"""A matrix in the map: words (R, C * bits / 32), scales (R, G), and biases (R, G) if it has any."""
Input = tuple[Floats, int, int, Floats]
"""x and its sums of groups, and between them their addresses."""
FEW = 1 << 21  # products of two values; for fewer a second thread costs what it saves
AT_ONCE = 256  # sums that are kept in registers
AHEAD = 4096  # bytes of words: a processor itself fetches nothing from the next page

# y[t, row] = sum over groups of scale * codes . x[t] + bias * (sum of x[t]), a group at a time. Of
# two codes in a byte all lower ones precede all upper ones, in x as well. A line with {t} stands
# there once for each t. x is (G, T, C / G), its sums of groups (G, T), y (T, R).
PRODUCT = """
declare float @llvm.vector.reduce.fadd.v{size}f32(float, <{size} x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
define void @product(ptr %words, ptr %scales, ptr %biases, ptr %x, ptr %sums, ptr %y, i64 %groups,
                     i64 %rows, i64 %start, i64 %stop) {{
begin:
  br label %row
row:
  %r = phi i64 [%start, %begin], [%next_r, %stored]
  %before = mul i64 %r, %groups
  br label %group
group:
  %g = phi i64 [0, %row], [%next_g, %group]
  %sum{t} = phi <{size} x float> [zeroinitializer, %row], [%next_sum{t}, %group]
  %shift{t} = phi float [0.0, %row], [%next_shift{t}, %group]
  %at = add i64 %before, %g
  %words_at = getelementptr [{octets} x i8], ptr %words, i64 %at
  %ahead = getelementptr i8, ptr %words_at, i64 {ahead}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %scale_at = getelementptr {half}, ptr %scales, i64 %at
  %octets = load <{octets} x i8>, ptr %words_at, align 1
  %half_scale = load {half}, ptr %scale_at
{unpack}
  %integers = uitofp <{size} x i8> %codes to <{size} x float>
  %scale = fpext {half} %half_scale to float
{bias}
  %one_scale = insertelement <{size} x float> poison, float %scale, i64 0
  %all_scale = shufflevector <{size} x float> %one_scale, <{size} x float> poison, <{size} x i32> zeroinitializer
  %values = fmul <{size} x float> %integers, %all_scale
  %first = mul i64 %g, {count}
  %t{t} = add i64 %first, {t}
  %x_at{t} = getelementptr [{size} x float], ptr %x, i64 %t{t}
  %x{t} = load <{size} x float>, ptr %x_at{t}, align 4
  %product{t} = fmul contract <{size} x float> %values, %x{t}
  %next_sum{t} = fadd contract <{size} x float> %sum{t}, %product{t}
  %x_sum_at{t} = getelementptr float, ptr %sums, i64 %t{t}
  %x_sum{t} = load float, ptr %x_sum_at{t}
  %of_bias{t} = fmul contract float %bias, %x_sum{t}
  %next_shift{t} = fadd contract float %shift{t}, %of_bias{t}
  %next_g = add i64 %g, 1
  %more = icmp ult i64 %next_g, %groups
  br i1 %more, label %group, label %stored
stored:
  %total{t} = call reassoc float @llvm.vector.reduce.fadd.v{size}f32(float %next_shift{t}, <{size} x float> %next_sum{t})
  %before{t} = mul i64 %rows, {t}
  %place{t} = add i64 %before{t}, %r
  %y_at{t} = getelementptr float, ptr %y, i64 %place{t}
  store float %total{t}, ptr %y_at{t}
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %stop
  br i1 %again, label %row, label %end
end:
  ret void
}}
"""  # noqa: E501
BIAS = {
    "affine": """  %bias_at = getelementptr {half}, ptr %biases, i64 %at
  %half_bias = load {half}, ptr %bias_at
  %bias = fpext {half} %half_bias to float""",
    "symmetric": "  %bias = freeze float %scale",  # -2**(bits-1) is in the sums of x
}


class Mapped(Protocol):
    """Weights that lie in a map."""

    def stored(self, matrix: Matrix) -> Stored:
        """A whole matrix where it lies."""


class PackedRows:
    """The compiled products, by so many threads.

    vectors: those that were read besides matrices, by name, as float32; they stay in memory.
    """

    def __init__(self, weights: Mapped, threads: int) -> None:
        # it loads `logging`, which runs that train need not
        from concurrent.futures import ThreadPoolExecutor

        self.weights, self.threads = weights, threads
        self.vectors: dict[str, Floats] = {}
        self._stored: dict[int, tuple[Stored, tuple[int, ...]]] = {}
        self._others = ThreadPoolExecutor(max(1, threads - 1))

    def prepare(self, matrices: Iterable[Matrix]) -> None:
        """Compile the products of any number of rows with these matrices, all at once."""
        kinds = {_text(matrix, 1): matrix for matrix in matrices if matrix.compact}.values()
        counts = [(matrix, count) for matrix in kinds for count in range(1, _most(matrix) + 1)]
        compile_all(_text(*each) for each in counts)

    def multiply(self, x: Floats, matrices: Sequence[Matrix]) -> list[Floats]:
        """x W^T (T, R) for x (T, C) and each of some matrices that are `compact`."""
        ys = [np.empty((len(x), matrix.rows), np.float32) for matrix in matrices]
        inputs: dict[tuple[Any, ...], Input] = {}
        jobs = []
        for matrix, y in zip(matrices, ys, strict=True):
            width = _most(matrix)
            for start in range(0, len(x), width):
                key = (matrix.bits, matrix.group_size, matrix.layout, start)
                if key not in inputs:
                    inputs[key] = _input(x[start : start + width], matrix)
                given, *addresses, _ = inputs[key]
                places = (*self._address(matrix), *addresses, y[start:].ctypes.data)
                product = function(_text(matrix, given.shape[1]), 10)
                arrays = y, inputs[key]  # which stay as long as a thread has their addresses
                jobs.append((product, (*places, len(given), matrix.rows), matrix.rows, arrays))
        large = len(x) * sum(matrix.rows * matrix.columns for matrix in matrices) >= FEW
        threads = self.threads if large else 1

        def work(number: int) -> None:
            for product, arguments, rows, _ in jobs:
                start, stop = (rows * at // threads for at in (number, number + 1))
                if start < stop:
                    product(*arguments, start, stop)

        others = [self._others.submit(work, number) for number in range(1, threads)]
        work(0)
        for other in others:
            other.result()
        return ys

    def _address(self, matrix: Matrix) -> tuple[int, ...]:
        """Where a matrix's words, scales and biases lie; without biases its scales again."""
        if matrix.packed.offset not in self._stored:
            stored = self.weights.stored(matrix)
            words, scales, *biases = (array.ctypes.data for array in stored)
            self._stored[matrix.packed.offset] = (stored, (words, scales, *(biases or [scales])))
        return self._stored[matrix.packed.offset][1]


def _input(x: Floats, matrix: Matrix) -> Input:
    """x (T, C) as the product with a matrix takes it."""
    size = matrix.group_size
    given: Floats = np.ascontiguousarray(x.reshape(len(x), -1, size).swapaxes(0, 1))
    sums = np.add.reduce(given, axis=2)
    if matrix.biases is None:  # bias = -2**(bits-1) * scale
        sums *= np.float32(-(2.0 ** (matrix.bits - 1)))
    if matrix.bits == 4:
        pairs = given.reshape(*given.shape[:2], size // 2, 2)
        given = pairs.swapaxes(2, 3).copy().reshape(given.shape)
    return given, given.ctypes.data, sums.ctypes.data, sums


def _most(matrix: Matrix) -> int:
    """How many rows are multiplied at once."""
    return max(1, AT_ONCE // matrix.group_size)


def _text(matrix: Matrix, count: int) -> str:
    """The product of so many rows with such a matrix, in LLVM's language."""
    assert matrix.scales is not None
    return text_of(matrix.bits, matrix.group_size, matrix.layout, matrix.scales.dtype, count)


@cache
def text_of(bits: int, size: int, layout: str, scales: str, count: int) -> str:
    """The product of so many rows, for groups of `size` columns and scales of a type."""
    octets = size * bits // 8
    half = HALVES[scales]
    sizes = {"size": size, "octets": octets, "half": half, "count": count, "ahead": AHEAD}
    order = ", ".join(f"i32 {at}" for at in range(size))
    sizes["bias"] = BIAS[layout].format(half=half)
    sizes["unpack"] = UNPACK[bits].format(**sizes, order=order)
    lines = [
        line.format(**sizes, t=t)
        for line in PRODUCT.splitlines()
        for t in range(count if "{t}" in line else 1)
    ]
    return "\n".join(lines)
