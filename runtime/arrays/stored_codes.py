"""Quantized matrices where they lie in a map, and their codes and scales in compiled code."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy.typing as npt

from runtime.arrays.stored import Matrix
from runtime.machine.llvm_code import Pointer, Value

Stored = tuple[npt.NDArray[Any], ...]
"""A matrix in the map: words (R, C * bits / 32), scales (R, G), and biases (R, G) if it has any."""

TYPES = {"float32": "float", "float16": "half", "bfloat16": "i16"}


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
