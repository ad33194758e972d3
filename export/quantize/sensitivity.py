"""How much a model would lose by the quantization of each matrix, from one backward pass.

Changing a matrix by E changes the loss of a row of tokens by <dL/dW, E> to first order. The mean
square of that over rows is, to second order, twice the KL divergence of the new predictions: the
empirical Fisher information in the direction E. <dL/dW, E> = sum_t dy_t . (E x_t), so the gradient
of W is never formed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.quantize.search import quantize_rows
from export.stored import F32, MatrixRows, QuantizedForm
from runtime.core.files import storage_errors


class Sensitivities:
    """Sums over rows of the squared first-order change of the loss, for each matrix.

    It is called with the input and the output's gradient of every product, for one row after
    another; all rows of a block come before those of the next block. The errors E of a block's
    matrices are computed once, and wait in scratch files.
    """

    def __init__(
        self, source: MatrixRows, forms: Mapping[str, QuantizedForm], scratch: Path
    ) -> None:
        self.source, self.packings, self.scratch = source, forms, scratch
        self.squares: dict[str, float] = dict.fromkeys(forms, 0.0)
        self._errors: dict[str, npt.NDArray[np.float32]] = {}
        self._block = ""

    def __call__(self, name: str, x: F32, dy: F32) -> None:
        """Add a row: the matrix, its input x (T, C), and the gradient dy (T, R) of its output."""
        if name not in self.packings:
            return
        error = self._error(name)
        change = 0.0
        for start, stop in self.source.ranges(name):
            products = x @ error[start:stop].T
            change += float(np.vdot(dy[:, start:stop], products))
        self.squares[name] += change * change

    def divergence(self, name: str, tokens: int) -> float:
        """The expected KL divergence in nats per token, for rows of `tokens` tokens in all."""
        return self.squares[name] / (2 * tokens)

    def _error(self, name: str) -> npt.NDArray[np.float32]:
        """E (R, C) of a matrix, mapped."""
        block = _block_of(name)
        if block != self._block:
            self._errors.clear()
            self._block = block
        if name not in self._errors:
            form = self.packings[name]
            with storage_errors(self.scratch), tempfile.TemporaryFile(dir=self.scratch) as file:
                for start, stop in self.source.ranges(name):
                    values = self.source.source_rows(name, start, stop)
                    rounded = quantize_rows(values, form).rows.values(form)
                    file.write((rounded - values).tobytes())
                file.flush()
                shape = self.source.shape(name)
                self._errors[name] = np.memmap(file, np.float32, "r", shape=shape)
        return self._errors[name]


def _block_of(name: str) -> str:
    """What the names of a layer's matrices have in common: all up to the layer's number."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])
