"""Integer quantization by groups, at the scales and biases of least squared error.

The inputs of a matrix do not matter here: each value goes to the nearest integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from export.quantize.scales import Floats, fit_affine, fit_symmetric, inverse_of
from export.stored import F32, QuantizedForm, QuantizedRows, words_of

CHUNK_VALUES = 1 << 16  # searched at once: so many fit a core's cache
ErrorSums = tuple[float, float, float]  # see `error_sums`
T = TypeVar("T")
FITS: dict[str, Callable[[F32, int, npt.DTypeLike], tuple[Floats, Floats | None]]] = {
    "symmetric": fit_symmetric,
    "affine": fit_affine,
}


@dataclass(frozen=True)
class Quantized:
    """Quantized rows, and the errors of the quantization.

    square_sum, error_sum: of the squares of the values and of their errors.  error_max: the largest
    error's magnitude.
    """

    rows: QuantizedRows
    square_sum: float
    error_sum: float
    error_max: float

    @property
    def overflows(self) -> bool:
        """Whether a scale or a bias is too large for its type."""
        biases = self.rows.biases
        finite = np.isfinite(self.rows.scales).all()
        return not (finite and (biases is None or np.isfinite(biases).all()))


def together(parts: Sequence[ErrorSums]) -> ErrorSums:
    """The sums of a matrix that was quantized in parts."""
    square_sums, error_sums, errors_max = zip(*parts, strict=True) if parts else ((), (), ())
    return sum(square_sums), sum(error_sums), max(errors_max, default=0.0)


def error_sums(values: F32, errors: F32) -> ErrorSums:
    """The sums of the squares of values and of their errors, and the largest error's magnitude."""
    return (
        float(np.square(values, dtype=np.float64).sum()),
        float(np.square(errors, dtype=np.float64).sum()),
        float(np.abs(errors).max(initial=0.0)),
    )


def quantize_rows(w: F32, form: QuantizedForm, threads: int = 2) -> Quantized:
    """Quantize rows (R, C) of finite values; the group size must divide C.

    Scales and biases that are too large for their type are infinite.
    """
    groups = _groups(w, form)
    codes = np.empty(groups.shape, np.uint8)
    scales = np.empty(len(groups), form.scale_dtype)
    biases = np.empty(len(groups), form.scale_dtype) if form.layout == "affine" else None

    def work(part: slice) -> ErrorSums:
        w = groups[part]
        scale, bias = _fit(w, form)
        scales[part] = scale
        if biases is not None:
            biases[part] = bias
        with np.errstate(over="ignore", invalid="ignore"):  # seen as infinite scales
            codes[part], error = _round(w, scale, bias, form.bits)
            return error_sums(w, error)

    sums = _in_parts(work, groups, threads)
    by_row = (len(w), w.shape[1] // form.group_size)
    rows = QuantizedRows(
        words_of(codes.reshape(w.shape), form.bits),
        scales.reshape(by_row),
        biases if biases is None else biases.reshape(by_row),
    )
    return Quantized(rows, *together(sums))


def fit_rows(w: F32, form: QuantizedForm, threads: int = 2) -> tuple[Floats, Floats | None]:
    """The scales and biases (R, C / group_size) at which `quantize_rows` stores rows (R, C)."""
    groups = _groups(w, form)
    by_row = (len(w), w.shape[1] // form.group_size)
    parts = _in_parts(lambda part: _fit(groups[part], form), groups, threads)
    scales = np.concatenate([scale for scale, _ in parts]).reshape(by_row)
    if form.layout == "symmetric":
        return scales, None
    return scales, np.concatenate([bias for _, bias in parts]).reshape(by_row)


def _groups(w: F32, form: QuantizedForm) -> F32:
    return np.ascontiguousarray(w).reshape(-1, form.group_size)


def _in_parts(work: Callable[[slice], T], groups: F32, threads: int) -> list[T]:
    """The results of `work` for parts of the groups, in order."""
    step = max(1, CHUNK_VALUES // groups.shape[1])
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, [slice(i, i + step) for i in range(0, len(groups), step)]))


def _fit(w: F32, form: QuantizedForm) -> tuple[Floats, Floats | None]:
    with np.errstate(over="ignore", invalid="ignore"):  # seen as infinite scales
        return FITS[form.layout](w, form.bits, form.scale_dtype)


def _round(
    w: F32, scales: Floats, biases: Floats | None, bits: int
) -> tuple[npt.NDArray[np.uint8], F32]:
    """The nearest integers for groups (G, group_size), and the errors that they leave."""
    scale = scales.astype(np.float32)
    zero = np.float32(2.0 ** (bits - 1) if biases is None else 0)
    shifted = w if biases is None else w - biases.astype(np.float32)[:, None]
    q = shifted * inverse_of(scale)[:, None]
    np.rint(q, out=q)
    np.clip(q, -zero, 2.0**bits - 1 - zero, out=q)
    error = shifted - q * scale[:, None]
    q += zero
    return q.astype(np.uint8), error
