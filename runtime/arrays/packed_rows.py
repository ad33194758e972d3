"""A few rows of values times packed weights where they lie, by code that LLVM has compiled.

MLX multiplies packed weights on a CPU one value at a time, after they were copied out of the map.
Here all cores read them from the map, by the processor's widest instructions. Values and sums are
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Matrix
from runtime.arrays.stored_codes import TYPES, Mapped, Stored, unpacked, widened
from runtime.machine.llvm_code import Code, Integer, Pointer, Variable, fma
from runtime.machine.machine_code import Text, compile_all, function

Floats = npt.NDArray[np.float32]

Input = tuple[Floats, int, int, Floats]
"""x and its sums of groups, and between them their addresses."""
FEW = 1 << 21  # products of two values; for fewer a second thread costs what it saves
AT_ONCE = 256  # sums that are kept in registers
AHEAD = 4096  # bytes of words: a processor itself fetches nothing from the next page


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


def _text(matrix: Matrix, count: int) -> Text:
    """The product of so many rows with such a matrix, in LLVM's language."""
    assert matrix.scales is not None
    settings = matrix.bits, matrix.group_size, matrix.layout, matrix.scales.dtype, count
    return Text(text_of, settings)


def text_of(bits: int, size: int, layout: str, scales: str, count: int) -> str:
    """The product of so many rows, for groups of `size` columns and scales of a type."""
    settings = {"bits": bits, "size": size, "layout": layout, "dtype": scales, "count": count}
    return Code().text(_product, **settings)


def _product(
    code: Code,
    words: Pointer,
    scales: Pointer,
    biases: Pointer,
    x: Pointer,
    sums: Pointer,
    y: Pointer,
    groups: Integer,
    rows: Integer,
    start: Integer,
    stop: Integer,
    *,
    bits: int,
    size: int,
    layout: str,
    dtype: str,
    count: int,
) -> None:
    """y[t, row] = sum over groups of scale * codes . x[t] + bias * (sum of x[t]), (T, R).

    Of two codes in a byte all lower ones precede all upper ones, in x as well. x is
    (G, T, C / G), and its sums of groups (G, T).
    """
    words, octets = words.view("i8"), size * bits // 8
    scales, biases = scales.view(TYPES[dtype]), biases.view(TYPES[dtype])
    with code.loop(start, stop) as r:
        first = r * groups
        z = [Variable(code.value(0.0, "float", size)) for _ in range(count)]
        shifts = [Variable(code.value(0.0, "float")) for _ in range(count)]
        with code.loop(0, groups, change=[*z, *shifts]) as g:
            at = first + g
            (words + at * octets + AHEAD).prefetch(locality=3)
            codes = unpacked(words + at * octets, size, bits, in_order=False)
            scale = widened(scales[at])
            # without biases -2**(bits-1) is in the sums of x
            bias = widened(biases[at]) if layout == "affine" else scale
            values = codes.astype("i32").astype("float") * scale.splat(size)
            for t, (total, shift) in enumerate(zip(z, shifts, strict=True)):
                of_x = g * count + t
                total.now = fma(values, (x + of_x * size).load(lanes=size), total.now)
                shift.now = fma(bias, sums[of_x], shift.now)
        for t, (total, shift) in enumerate(zip(z, shifts, strict=True)):
            y[rows * t + r] = total.now.sum(onto=shift.now)
