"""Tiles dequantized to bfloat16 by code that LLVM has compiled for this processor.

Words, scales and biases are read where they lie in the map, in any of its columns. The reference is
`runtime.arrays.dequantize`, whose values these are to the last bit, rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.stored import Matrix
from runtime.machine.machine_code import compile_all, function

Stored = tuple[npt.NDArray[Any], ...]
"""Words (R, C * bits / 32), scales (R, G), and biases (R, G) if there are any."""

# y[r, g] = scale * (codes - middle), a group g of row r at a time. Of 4 bits, the lower of a byte
# come first.
DEQUANTIZE = """
define void @dequantize(ptr %words, ptr %scales, ptr %biases, ptr %y, ptr %shifts, i64 %groups,
                        i64 %between, i64 %rows) {{
begin:
  br label %row
row:
  %r = phi i64 [0, %begin], [%next_r, %done]
  %before = mul i64 %r, %between
  %y_before = mul i64 %r, %groups
  br label %group
group:
  %g = phi i64 [0, %row], [%next_g, %group]
  %at = add i64 %before, %g
  %words_at = getelementptr [{octets} x i8], ptr %words, i64 %at
  %octets = load <{octets} x i8>, ptr %words_at, align 1
{unpack}
  %signed = sub <{size} x i8> %codes, splat (i8 {middle})
  %integers = sitofp <{size} x i8> %signed to <{size} x float>
  %scale_at = getelementptr {half}, ptr %scales, i64 %at
{scale}
  %one_scale = insertelement <{size} x float> poison, float %scale, i64 0
  %all_scale = shufflevector <{size} x float> %one_scale, <{size} x float> poison, <{size} x i32> zeroinitializer
  %scaled = fmul <{size} x float> %integers, %all_scale
  %values = fptrunc <{size} x float> %scaled to <{size} x bfloat>
  %y_group = add i64 %y_before, %g
{shift}
  %y_at = getelementptr [{size} x bfloat], ptr %y, i64 %y_group
  store <{size} x bfloat> %values, ptr %y_at, align 2
  %next_g = add i64 %g, 1
  %more = icmp ult i64 %next_g, %groups
  br i1 %more, label %group, label %done
done:
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %rows
  br i1 %again, label %row, label %end
end:
  ret void
}}
"""  # noqa: E501
UNPACK = {
    8: "  %codes = freeze <{size} x i8> %octets",
    4: """  %low = and <{octets} x i8> %octets, splat (i8 15)
  %high = lshr <{octets} x i8> %octets, splat (i8 4)
  %codes = shufflevector <{octets} x i8> %low, <{octets} x i8> %high, <{size} x i32> <{order}>""",
}
SHIFT = """  %bias_at = getelementptr {half}, ptr %biases, i64 %at
{bias}
  %middle = fmul float %scale, {middle}.0
  %shift = fadd float %bias, %middle
  %shift_at = getelementptr float, ptr %shifts, i64 %y_group
  store float %shift, ptr %shift_at"""
# A bfloat16 is the upper half of its float32. For LLVM's own conversion of it, processors without
# such instructions may call a function that is not there.
READ = {
    "float": "  %{name} = load float, ptr %{name}_at",
    "half": """  %half_{name} = load half, ptr %{name}_at
  %{name} = fpext half %half_{name} to float""",
    "bfloat": """  %half_{name} = load i16, ptr %{name}_at
  %wide_{name} = zext i16 %half_{name} to i32
  %upper_{name} = shl i32 %wide_{name}, 16
  %{name} = bitcast i32 %upper_{name} to float""",
}
HALVES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


@cache
def text_of(bits: int, size: int, scales: str, affine: bool) -> str:
    """The function for groups of `size` columns and scales of a type.

    The shifts of affine groups are stored apart.
    """
    octets, half = size * bits // 8, HALVES[scales]
    order = ", ".join(f"i32 {at // 2 + octets * (at % 2)}" for at in range(size))
    sizes = {"size": size, "octets": octets, "half": half, "middle": 1 << (bits - 1)}
    sizes |= {name: READ[half].format(name=name) for name in ("scale", "bias")}
    return DEQUANTIZE.format(
        **sizes,
        unpack=UNPACK[bits].format(**sizes, order=order),
        shift=SHIFT.format(**sizes) if affine else "",
    )


class Mapped(Protocol):
    """Weights that lie in a map."""

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


def _text(matrix: Matrix) -> str:
    scales = matrix.scales
    assert scales is not None, "a matrix in floating point is converted"
    return text_of(matrix.bits, matrix.group_size, scales.dtype, matrix.biases is not None)
