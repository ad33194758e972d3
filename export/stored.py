"""How a matrix is stored in a bundle, and rows of a matrix in that form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
FloatType = Literal["float32", "float16", "bfloat16"]


def numpy_type(name: str) -> np.dtype[Any]:
    """NumPy's type of this name, or the bfloat16 that NumPy lacks."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # which an interpreter for other programs need not have

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


@dataclass(frozen=True)
class QuantizedForm:
    """The stored form of a quantized matrix: value = scale * q + bias, for each group of a row.

    q are unsigned integers of `bits` bits. "symmetric" stores no biases: they are
    -2**(bits - 1) * scale. `scale_dtype` is the type of the scales and biases: "float16" or
    "float32".
    """

    bits: int
    group_size: int
    layout: Literal["symmetric", "affine"]
    scale_dtype: Literal["float16", "float32"]

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each value, with its share of scales and biases."""
        numbers = 2 if self.layout == "affine" else 1
        return self.bits + numbers * 8 * np.dtype(self.scale_dtype).itemsize / self.group_size


@dataclass(frozen=True)
class FloatForm:
    """The stored form of a matrix of floats."""

    dtype: FloatType

    @property
    def bits(self) -> int:
        """Bits of storage for each value."""
        return 32 if self.dtype == "float32" else 16

    @property
    def bits_per_weight(self) -> float:
        return self.bits

    def rounded(self, values: F32) -> npt.NDArray[Any]:
        """The values in the stored type; those that are too large become infinite."""
        with np.errstate(over="ignore"):
            return values.astype(numpy_type(self.dtype), copy=False)

    def holds(self, values: F32) -> bool:
        """Whether the stored type has all these values exactly."""
        return bool((self.rounded(values).astype(np.float32) == values).all())


StoredForm = QuantizedForm | FloatForm


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantized matrix.

    words: (R, C * bits / 32) uint32, the first integer in the lowest bits.
    scales, biases: (R, C / group_size); `biases` is None if the layout is symmetric.
    """

    words: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.floating[Any]]
    biases: npt.NDArray[np.floating[Any]] | None

    def values(self, form: QuantizedForm) -> F32:
        """The values (R, C) that the rows stand for."""
        scales = self.scales.astype(np.float32)[..., None]
        codes = codes_of(self.words, form.bits)
        q = codes.reshape(*self.scales.shape, form.group_size).astype(np.float32)
        if self.biases is None:
            values = (q - 2.0 ** (form.bits - 1)) * scales
        else:
            values = q * scales + self.biases.astype(np.float32)[..., None]
        return values.reshape(codes.shape).astype(np.float32, copy=False)


def words_of(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """Unsigned integers (R, C) of 4 or 8 bits in words (R, C * bits / 32)."""
    if bits == 4:
        codes = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    return np.ascontiguousarray(codes).view("<u4")


def codes_of(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    """The unsigned integers (R, C) of 4 or 8 bits in words (R, C * bits / 32)."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    codes = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    codes[:, 0::2] = octets & 15
    codes[:, 1::2] = octets >> 4
    return codes
