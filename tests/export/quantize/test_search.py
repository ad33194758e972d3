"""Quantization against plain NumPy: the layout to the byte, and errors no worse than rounding."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from export.quantize.search import quantize_rows

Rng = np.random.Generator
GRIDS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def decoded(packed: np.ndarray, scales: np.ndarray, bits: int, group: int) -> np.ndarray:
    """The values (R, C) float64, by the format's words: lowest bits first."""
    rows = len(packed)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(rows, -1, group)
    signed = codes.astype(np.float64) - 2 ** (bits - 1)
    return (signed * scales.astype(np.float64)[..., None]).reshape(rows, -1)


def rounded(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Plain rounding: the largest magnitude of a group is the largest integer."""
    groups = w.astype(np.float64).reshape(-1, group)
    top = 2 ** (bits - 1) - 1
    scale = (np.abs(groups).max(axis=1, keepdims=True) / top).astype(np.float16).astype(np.float64)
    scale[scale == 0] = 1
    q = np.clip(np.rint(groups / scale), -top - 1, top)
    return (q * scale).reshape(w.shape)


SAMPLES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(2, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "positive": lambda rng, shape: rng.uniform(0, 1, shape),
    "outlier": lambda rng, shape: (
        rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 30, 1)
    ),
}


@pytest.mark.parametrize(("bits", "group"), GRIDS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_error_is_never_above_that_of_rounding(
    rng: Rng, sample: str, bits: int, group: int
) -> None:
    shape = (int(rng.integers(8, 40)), group * int(rng.integers(2, 6)))
    size = float(10 ** rng.uniform(-2, 1))
    w = (SAMPLES[sample](rng, shape) * size).astype(np.float32)
    found = quantize_rows(w, bits, group)
    values = decoded(found.packed, found.scales, bits, group)
    error = np.square(values - w).sum()
    assert error <= np.square(rounded(w, bits, group) - w).sum()
    assert found.error_sum == pytest.approx(error, rel=1e-3)
    assert found.error_max == pytest.approx(np.abs(values - w).max(), rel=1e-3)
    assert found.square_sum == pytest.approx(np.square(w.astype(np.float64)).sum(), rel=1e-6)


@pytest.mark.parametrize(("bits", "group"), GRIDS)
def test_mlx_reads_what_was_written(rng: Rng, bits: int, group: int) -> None:
    w = rng.standard_normal((11, group * 3)).astype(np.float32)
    found = quantize_rows(w, bits, group)
    assert found.packed.dtype == np.uint32
    assert found.packed.shape == (11, group * 3 * bits // 32)
    assert found.scales.dtype == np.float16
    assert found.scales.shape == (11, 3)
    scales = mx.array(found.scales).astype(mx.float32)
    biases = scales * -(2.0 ** (bits - 1))
    by_mlx = mx.dequantize(mx.array(found.packed), scales, biases, group_size=group, bits=bits)
    assert (np.array(by_mlx) == decoded(found.packed, found.scales, bits, group)).all()
    relative = np.linalg.norm(np.array(by_mlx) - w) / np.linalg.norm(w)
    assert relative < {4: 0.15, 8: 0.015}[bits]


def test_four_bits_to_the_byte() -> None:
    w = (0.5 * np.tile(np.arange(-8, 8), 2)).astype(np.float32)[None]
    found = quantize_rows(w, 4, 32)
    assert found.packed.tobytes() == bytes.fromhex("1032547698badcfe" * 2)
    assert found.scales.tobytes() == bytes.fromhex("0038")  # 0.5
    assert found.error_sum == found.error_max == 0
    mirrored = quantize_rows(-w, 4, 32)  # scales may be negative: the same integers
    assert mirrored.packed.tobytes() == found.packed.tobytes()
    assert mirrored.scales.tobytes() == bytes.fromhex("00b8")  # -0.5


def test_eight_bits_to_the_byte() -> None:
    integers = [-128, 127, 0, 1, -1, 64, -64, 100] * 4
    found = quantize_rows(0.25 * np.array([integers], np.float32), 8, 32)
    assert found.packed.tobytes() == bytes(value + 128 for value in integers)
    assert found.scales.tobytes() == bytes.fromhex("0034")  # 0.25
    assert found.error_sum == 0


def test_groups_are_scaled_apart() -> None:
    w = np.concatenate([np.full(32, 0.5), np.full(32, -8), np.zeros(32)]).astype(np.float32)[None]
    found = quantize_rows(w, 4, 32)
    np.testing.assert_allclose(decoded(found.packed, found.scales, 4, 32), w, rtol=1e-3)
    assert found.scales.shape == (1, 3)


@pytest.mark.parametrize(("bits", "zero"), [(4, 0x88), (8, 0x80)])
def test_zeros_stay_zeros(bits: int, zero: int) -> None:
    found = quantize_rows(np.zeros((3, 64), np.float32), bits, 64)
    assert set(found.packed.tobytes()) == {zero}
    assert not found.scales.any()
    assert found.error_sum == found.square_sum == found.error_max == 0


def test_a_single_value_is_kept(rng: Rng) -> None:
    # an eighth of the smallest is still a normal float16, which has 11 bits
    for value in (rng.choice([-1, 1], 8) * 10 ** rng.uniform(-3, 3, 8)).astype(np.float32):
        w = np.zeros((1, 64), np.float32)
        w[0, rng.integers(64)] = value
        found = quantize_rows(w, 4, 64)
        np.testing.assert_allclose(decoded(found.packed, found.scales, 4, 64), w, rtol=1e-3)


def test_results_depend_neither_on_threads_nor_on_slices(rng: Rng) -> None:
    w = rng.standard_normal((3000, 64)).astype(np.float32)
    whole = quantize_rows(w, 4, 64, threads=1)
    again = quantize_rows(w, 4, 64, threads=4)
    assert (whole.packed == again.packed).all()
    assert (whole.scales == again.scales).all()
    cut = int(rng.integers(1, 3000))
    parts = [quantize_rows(part, 4, 64) for part in (w[:cut], w[cut:])]
    assert (np.concatenate([part.packed for part in parts]) == whole.packed).all()
    assert sum(part.error_sum for part in parts) == pytest.approx(whole.error_sum)


def test_values_beyond_float16_show_as_infinite_scales() -> None:
    for value in (1e9, 1e20, 3e38):
        w = np.zeros((1, 96), np.float32)
        w[0, 40], w[0, 50], w[0, 60] = value, -value, value
        found = quantize_rows(w, 4, 32)
        assert np.isfinite(found.scales).tolist() == [[True, False, True]], value
