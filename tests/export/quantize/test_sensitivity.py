"""The expected divergence from first-order changes of the loss, against changes that are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from export.quantize.bits import Sensitivities
from export.quantize.search import quantize_rows
from export.stored import QuantizedForm

F32 = npt.NDArray[np.float32]
PACKING = QuantizedForm(4, 32, "affine", "float16")


class Matrices:
    """Matrices in memory, read in slices of five rows."""

    def __init__(self, values: dict[str, F32]) -> None:
        self.values = values

    def ranges(self, name: str) -> Iterator[tuple[int, int]]:
        rows = len(self.values[name])
        return ((start, min(rows, start + 5)) for start in range(0, rows, 5))

    def shape(self, name: str) -> tuple[int, int]:
        rows, columns = self.values[name].shape
        return rows, columns

    def source_rows(self, name: str, start: int, stop: int) -> F32:
        return self.values[name][start:stop]


def test_squares_of_the_change_that_the_gradient_predicts(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    names = ("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.left_out")
    values = {name: rng.normal(size=(12, 64)).astype(np.float32) for name in names}
    found = Sensitivities(Matrices(values), dict.fromkeys(names[:3], PACKING), tmp_path)
    expected = dict.fromkeys(names[:3], 0.0)
    for layer in ("layers.1", "layers.0"):
        for _ in range(3):  # rows of tokens
            for name in (one for one in names if one.startswith(layer)):
                x = rng.normal(size=(7, 64)).astype(np.float32)
                dy = rng.normal(size=(7, 12)).astype(np.float32)
                found(name, x, dy)
                if name in expected:
                    error = quantize_rows(values[name], PACKING).rows.values(PACKING) - values[name]
                    gradient = dy.astype(np.float64).T @ x
                    expected[name] += float((gradient * error).sum()) ** 2
    assert found.squares == pytest.approx(expected, rel=1e-4)
    assert found.divergence(names[0], 21) == pytest.approx(expected[names[0]] / 42, rel=1e-4)
    assert list(tmp_path.iterdir()) == []  # the scratch files have no name
