"""The stored form of quantized matrices."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from export.stored import QuantizedForm, QuantizedRows, codes_of, words_of


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["symmetric", "affine"])
def test_values_are_those_that_mlx_dequantizes(
    rng: np.random.Generator, bits: int, layout: str
) -> None:
    codes = rng.integers(0, 2**bits, (6, 128)).astype(np.uint8)
    words = words_of(codes, bits)
    assert (codes_of(words, bits) == codes).all()
    scales = rng.normal(size=(6, 4)).astype(np.float32)
    biases = rng.normal(size=(6, 4)).astype(np.float32) if layout == "affine" else None
    found = QuantizedRows(words, scales, biases).values(
        QuantizedForm(bits, 32, "affine" if layout == "affine" else "symmetric", "float32")
    )
    shift = -(2.0 ** (bits - 1)) * scales if biases is None else biases
    arrays = (mx.array(words), mx.array(scales), mx.array(shift.astype(np.float32)))
    expected = np.array(mx.dequantize(*arrays, group_size=32, bits=bits))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bits_per_weight_counts_scales_and_biases() -> None:
    assert QuantizedForm(4, 64, "symmetric", "float16").bits_per_weight == 4.25
    assert QuantizedForm(4, 32, "affine", "float32").bits_per_weight == 6
