"""Which matrices get 8 bits instead of 4, under a limit of added bytes.

Changing a matrix by E changes the loss of a row of tokens by <dL/dW, E> to first order. The mean
square of that over rows is, to second order, twice the KL divergence of the new predictions: the
empirical Fisher information in the direction E. <dL/dW, E> = sum_t dy_t . (E x_t), so the gradient
of W is never formed: one backward pass measures all matrices.

Matrices get 8 bits in order of the loss that this saves for each byte that it adds, as long as they
fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        self.source, self.forms, self.scratch = source, forms, scratch
        self.squares: dict[str, float] = dict.fromkeys(forms, 0.0)
        self._errors: dict[str, npt.NDArray[np.float32]] = {}
        self._block = ""

    def __call__(self, name: str, x: F32, dy: F32) -> None:
        """Add a row: the matrix, its input x (T, C), and the gradient dy (T, R) of its output."""
        if name not in self.forms:
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
            form = self.forms[name]
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
    """The part that the names of a layer's matrices share: all up to the layer's number."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])


@dataclass(frozen=True)
class Candidate:
    """A matrix's bytes and loss at 4 and at 8 bits.

    loss_4, loss_8: the loss that is expected on top of the source's, in any one unit.
    """

    name: str
    bytes_4: int
    bytes_8: int
    loss_4: float
    loss_8: float

    @property
    def added_bytes(self) -> int:
        """The bytes that 8 bits take on top of those of 4."""
        return self.bytes_8 - self.bytes_4

    @property
    def saved_loss(self) -> float:
        """The loss that 8 bits save."""
        return self.loss_4 - self.loss_8


@dataclass(frozen=True)
class Choice:
    """The bits of a matrix, and why, in words for the manifest."""

    bits: int
    reason: str


def choose_bits(candidates: Sequence[Candidate], limit_bytes: int) -> dict[str, Choice]:
    """Each matrix's bits, by name, so that at most `limit_bytes` are added to 4 bits everywhere.

    The choice depends on the candidates' numbers and names, and not on their order.
    """
    ranked = sorted(candidates, key=lambda c: (-c.saved_loss / max(1, c.added_bytes), c.name))
    choices: dict[str, Choice] = {}
    left = limit_bytes
    for rank, candidate in enumerate(ranked, start=1):
        saves = (
            f"8 bits save {candidate.saved_loss:.3g} of loss for {candidate.added_bytes} bytes, "
            f"rank {rank} of {len(ranked)}"
        )
        if candidate.saved_loss <= 0:
            reason = (
                f"8 bits save no loss ({candidate.loss_8:.3g}, with 4 bits {candidate.loss_4:.3g})"
            )
            choices[candidate.name] = Choice(4, reason)
        elif candidate.added_bytes <= left:
            choices[candidate.name] = Choice(8, saves)
            left -= candidate.added_bytes
        else:
            choices[candidate.name] = Choice(4, f"{saves}; {left} bytes of the limit were left")
    return {candidate.name: choices[candidate.name] for candidate in candidates}
