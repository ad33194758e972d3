"""The values of a tensor in the type of a file, a slice of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from export.stored import F32, FloatForm, FloatType
from runtime.core.errors import BundleError
from runtime.core.notes import Progress

SLICE_VALUES = 1 << 20  # values of a tensor that are in memory at a time
Read = Callable[[int, int], F32]  # rows start:stop of a tensor


class Slices:
    """Reads tensors a slice at a time, rounds and checks them, and tells how far it is.

    `values` is the number of values in all tensors together.
    """

    def __init__(self, values: int, progress: Progress) -> None:
        self._total, self._done, self._progress = values, 0, progress

    def bytes_of(
        self, name: str, shape: tuple[int, ...], dtype: FloatType, read: Read
    ) -> Iterator[bytes]:
        """The tensor's bytes, little-endian and row-major; `read` gives its rows.

        Raises:
            BundleError: a value is not finite, or too large for the type.
        """
        form = FloatForm(dtype)
        width = math.prod(shape[1:])
        step = max(1, SLICE_VALUES // width)
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            values = read(start, stop)
            rounded = form.rounded(values)
            if not np.isfinite(rounded).all():
                raise BundleError(_not_finite(name, values, dtype))
            self._done += values.size
            yield rounded.tobytes()
            self._progress(name, self._done, self._total)


def _not_finite(name: str, values: F32, dtype: FloatType) -> str:
    if not np.isfinite(values).all():
        return f"{name} holds values that are no finite numbers: the bundle or adapter is damaged"
    most = float(np.abs(values).max())
    return f"{name} holds {most:.4g}, too large for {dtype}; use --dtype bfloat16 or float32"
