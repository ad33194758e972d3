"""Tiles dequantized to bfloat16 by code that LLVM has compiled for this processor.

Words, scales and biases are read where they lie in the map, in any of its columns. The reference is
`runtime.arrays.dequantize`, whose values these are to the last bit, rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Matrix
from runtime.machine.llvm_code import Code, Integer, Pointer, Value
from runtime.machine.machine_code import Text, compile_all, function

Stored = tuple[npt.NDArray[Any], ...]
"""A matrix in the map: words (R, C * bits / 32), scales (R, G), and biases (R, G) if it has any."""

TYPES = {"float32": "float", "float16": "half", "bfloat16": "i16"}


def text_of(bits: int, size: int, scales: str, affine: bool) -> str:
    """The function for groups of `size` columns and scales of a type.

    The shifts of affine groups are stored apart.
    """
    return Code().text(_dequantize, bits=bits, size=size, dtype=scales, affine=affine)


def _dequantize(
    code: Code,
    words: Pointer,
    scales: Pointer,
    biases: Pointer,
    y: Pointer,
    shifts: Pointer,
    groups: Integer,
    between: Integer,
    rows: Integer,
    *,
    bits: int,
    size: int,
    dtype: str,
    affine: bool,
) -> None:
    """y = scale * (code - middle), a group at a time; from row to row of scales are `between`."""
    middle = 1 << (bits - 1)
    words, y = words.view("i8"), y.view("bfloat")
    scales, biases = scales.view(TYPES[dtype]), biases.view(TYPES[dtype])
    with code.loop(0, rows) as r:
        first, y_first = r * between, r * groups
        with code.loop(0, groups) as g:
            at, to = first + g, y_first + g
            codes = unpacked(words + at * (size * bits // 8), size, bits)
            scale = widened(scales[at])
            values = (codes - middle).astype("float") * scale.splat(size)
            (y + to * size).store(values.astype("bfloat"))
            if affine:
                shifts[to] = widened(biases[at]) + scale * middle


def unpacked(words: Pointer, size: int, bits: int, in_order: bool = True) -> Value:
    """So many codes, a byte each; of two in a byte the lower is first, or all lower ones are."""
    octets = words.load(lanes=size * bits // 8)
    if bits == 8:
        return octets
    order = [at // 2 + octets.lanes * (at % 2) for at in range(size)]
    return (octets & 15).shuffle(octets >> 4, order if in_order else range(size))


def widened(numbers: Value) -> Value:
    """Scales or biases as float32, of which a bfloat16 is the upper half.

    For LLVM's own conversion of it, processors without such instructions may call a function that
    is not there.
    """
    if numbers.of == "i16":
        return (numbers.astype("i32") << 16).view("float")
    return numbers.astype("float") if numbers.of == "half" else numbers


class Mapped(Protocol):
    """Weights that lie in a map."""

    def stored(self, matrix: Matrix) -> Stored:
        """A whole matrix where it lies."""

    def mapped(
        self, matrix: Matrix, start: int, stop: int, by_columns: bool
    ) -> AbstractContextManager[Stored]:
        """Rows start:stop of a matrix, or columns, where they lie."""


class Dequantizing:
    """Dequantizes tiles to the bits of bfloat16 values, in one thread.

    Where a BLAS has two, the second one waits for products in a busy loop, and two threads of ours
    take as long.
    """

    def __init__(self, weights: Mapped) -> None:
        self.weights = weights

    def prepare(self, matrices: Iterable[Matrix]) -> None:
        """Compile what their tiles take, all at once."""
        compile_all({_text(matrix) for matrix in matrices if not matrix.is_float})

    def tile(
        self, matrix: Matrix, start: int, stop: int, by_columns: bool
    ) -> tuple[npt.NDArray[np.uint16], mx.array | None]:
        """Rows start:stop of a matrix, or columns: (R, C), and (R, G) the shifts not added."""
        with self.weights.mapped(matrix, start, stop, by_columns) as (words, scales, *biases):
            rows, groups = scales.shape
            values = np.empty((rows, groups * matrix.group_size), np.uint16)
            shift = np.empty((rows, groups) if biases else 0, np.float32)
            arrays = words, scales, *(biases or [scales]), values, shift
            places = [array.ctypes.data for array in arrays]
            between = scales.strides[0] // scales.itemsize
            function(_text(matrix), 8)(*places, groups, between, rows)
        return values, mx.array(shift) if biases else None


def _text(matrix: Matrix) -> Text:
    scales = matrix.scales
    assert scales is not None, "a matrix in floating point is converted"
    settings = matrix.bits, matrix.group_size, scales.dtype, matrix.biases is not None
    return Text(text_of, settings)
