"""Compiled dequantizing to bfloat16 against the operations of NumPy and MLX."""

from __future__ import annotations

from itertools import product
from typing import Literal

import numpy as np
import pytest
from oracles.bfloat16 import nearest
from support.bundles import Rng
from support.compiled import RandomMatrix, require_compiled

from runtime.arrays.arrays import CpuArrays
from runtime.arrays.compiled_dequantize import Dequantizing, text_of
from runtime.arrays.dequantize import dequantize
from runtime.machine.machine_code import Text, compile_all
from runtime.machine.onednn import INSTRUCTIONS
from runtime.machine.processor import cpu_flags

SIZES = (32, 64, 128)
SETTINGS = list(product((4, 8), SIZES, ("float16", "bfloat16", "float32"), ("symmetric", "affine")))


@pytest.fixture(scope="module", autouse=True)
def compiled_at_once() -> None:
    """A process for each text would take 0.2 s."""
    require_compiled()
    if not cpu_flags() & INSTRUCTIONS:
        pytest.skip("this processor does not multiply bfloat16")
    compile_all(Text(text_of, (*key[:3], key[3] == "affine")) for key in SETTINGS)


@pytest.mark.parametrize(("bits", "size", "scales", "layout"), SETTINGS)
def test_every_bit_is_that_of_the_reference(
    rng: Rng, bits: int, size: int, scales: str, layout: Literal["symmetric", "affine"]
) -> None:
    weights = RandomMatrix(rng, bits, layout, size, scales)
    matrix, arrays = weights.matrix, CpuArrays()
    for by_columns in (False, True):
        start, stop = weights.part(rng, by_columns)
        tile = weights.tile(start, stop, by_columns)
        halves, shift = Dequantizing(weights).tile(matrix, start, stop, by_columns)
        rounded = nearest(dequantize(tile, bits, arrays)).view(np.uint32)
        assert (halves.astype(np.uint32) << 16 == rounded).all()
        assert (shift is None) == (tile.shift is None)
        if shift is not None and tile.shift is not None:
            assert (np.array(shift) == np.array(tile.shift)).all()
