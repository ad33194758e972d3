"""Quantization against plain NumPy: the layout to the byte, and errors no worse than rounding."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from export.quantize.nearest import quantize_rows
from export.stored import QuantizedForm, QuantizedRows

Rng = np.random.Generator
PACKINGS = [
    QuantizedForm(bits, group, layout, "float16")
    for bits in (4, 8)
    for group in (32, 64, 128)
    for layout in ("symmetric", "affine")
]
FOUR, EIGHT = (QuantizedForm(bits, 32, "symmetric", "float16") for bits in (4, 8))


def decoded(rows: QuantizedRows, form: QuantizedForm) -> np.ndarray:
    """The values (R, C) float64, by the format's words: lowest bits first."""
    bits = form.bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (rows.words[:, :, None] >> shifts) & ((1 << bits) - 1)
    codes = codes.reshape(len(codes), -1, form.group_size).astype(np.float64)
    scales = rows.scales.astype(np.float64)
    biases = -(2 ** (bits - 1)) * scales if rows.biases is None else rows.biases.astype(np.float64)
    return (codes * scales[..., None] + biases[..., None]).reshape(len(codes), -1)


def rounded(w: np.ndarray, form: QuantizedForm) -> np.ndarray:
    """FloatForm rounding: the group's range, or its largest magnitude, spans the integers."""
    groups = w.astype(np.float64).reshape(-1, form.group_size)
    if form.layout == "affine":
        low = groups.min(axis=1, keepdims=True)
        step = (groups.max(axis=1, keepdims=True) - low) / (2**form.bits - 1)
        step, low = (a.astype(np.float16).astype(np.float64) for a in (step, low))
        step[step == 0] = 1
        q = np.clip(np.rint((groups - low) / step), 0, 2**form.bits - 1)
        return (low + q * step).reshape(w.shape)
    top = 2 ** (form.bits - 1) - 1
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


@pytest.mark.parametrize("form", PACKINGS, ids=repr)
@pytest.mark.parametrize("sample", SAMPLES)
def test_error_is_never_above_that_of_rounding(rng: Rng, sample: str, form: QuantizedForm) -> None:
    shape = (int(rng.integers(8, 40)), form.group_size * int(rng.integers(2, 6)))
    size = float(10 ** rng.uniform(-2, 1))
    w = (SAMPLES[sample](rng, shape) * size).astype(np.float32)
    found = quantize_rows(w, form)
    values = decoded(found.rows, form)
    error = np.square(values - w).sum()
    assert error <= np.square(rounded(w, form) - w).sum()
    assert found.error_sum == pytest.approx(error, rel=1e-2)
    assert found.error_max == pytest.approx(np.abs(values - w).max(), rel=1e-2)
    assert found.square_sum == pytest.approx(np.square(w.astype(np.float64)).sum(), rel=1e-6)


@pytest.mark.parametrize("form", PACKINGS, ids=repr)
def test_mlx_reads_what_was_written(rng: Rng, form: QuantizedForm) -> None:
    w = rng.standard_normal((11, form.group_size * 3)).astype(np.float32)
    rows = quantize_rows(w, form).rows
    assert rows.words.dtype == np.uint32
    assert rows.words.shape == (11, form.group_size * 3 * form.bits // 32)
    assert rows.scales.dtype == np.float16
    assert rows.scales.shape == (11, 3)
    scales = mx.array(rows.scales).astype(mx.float32)
    if rows.biases is None:
        biases = scales * -(2.0 ** (form.bits - 1))
    else:
        assert rows.biases.dtype == np.float16
        assert rows.biases.shape == (11, 3)
        biases = mx.array(rows.biases).astype(mx.float32)
    by_mlx = mx.dequantize(
        mx.array(rows.words), scales, biases, group_size=form.group_size, bits=form.bits
    )
    np.testing.assert_allclose(np.array(by_mlx), decoded(rows, form), rtol=0, atol=1e-6)
    relative = np.linalg.norm(np.array(by_mlx) - w) / np.linalg.norm(w)
    assert relative < {4: 0.15, 8: 0.015}[form.bits]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_affine_finds_what_a_long_search_finds(rng: Rng, bits: int, dtype: str) -> None:
    """Against a fine grid over both ends of the range, each followed by least squares."""
    w = rng.laplace(size=(20, 64)).astype(np.float32)
    form = QuantizedForm(bits, 64, "affine", dtype)
    best = np.full(20, np.inf)
    top = 2**bits - 1
    span = {4: 0.3, 8: 0.03}[bits]
    for low in np.linspace(-span / 5, span, 20):
        for high in np.linspace(-span / 5, span, 20):
            width = np.ptp(w, axis=1)
            step = (1 - low - high) * width / top
            bias = w.min(axis=1) + low * width
            for _ in range(4):
                q = np.clip(np.rint((w - bias[:, None]) / step[:, None]), 0, top)
                error = np.square(w - q * step[:, None] - bias[:, None]).sum(axis=1)
                best = np.minimum(best, error)
                middle = q - q.mean(axis=1, keepdims=True)
                step = (w * middle).sum(axis=1) / np.square(middle).sum(axis=1)
                bias = w.mean(axis=1) - step * q.mean(axis=1)
    assert quantize_rows(w, form).error_sum < best.sum() * {4: 1.15, 8: 1.25}[bits]


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_nearly_equal_values_use_both_numbers(rng: Rng, bits: int) -> None:
    """The bias alone has 11 bits: the scale must hold what its rounding leaves."""
    form = QuantizedForm(bits, 32, "affine", "float16")
    level = rng.uniform(1, 100, (16, 1)) * rng.choice([-1, 1], (16, 1))
    constant = np.broadcast_to(level, (16, 32)).astype(np.float32)
    found = quantize_rows(constant, form)
    np.testing.assert_allclose(decoded(found.rows, form), constant, rtol=1e-5)
    near = (constant + 1e-3 * rng.standard_normal((16, 32))).astype(np.float32)
    found = quantize_rows(near, form)
    ulp = np.spacing(np.abs(near).astype(np.float16)).astype(np.float64)
    error = np.sqrt(np.square(decoded(found.rows, form) - near).mean(axis=1))
    assert (error <= (ulp.max(axis=1) + 0.01) / 2**bits).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_subnormal_scales_are_chosen_as_they_are_stored(rng: Rng, bits: int) -> None:
    form = QuantizedForm(bits, 64, "affine", "float16")
    w = (rng.standard_normal((40, 64)) * 1e-5).astype(np.float32)
    found = quantize_rows(w, form)
    assert np.abs(found.rows.scales).max() < np.finfo(np.float16).smallest_normal
    assert found.error_sum <= np.square(rounded(w, form) - w).sum()
    assert found.error_sum < {4: 0.02, 8: 1e-3}[bits] * found.square_sum


def test_four_bits_to_the_byte() -> None:
    w = (0.5 * np.tile(np.arange(-8, 8), 2)).astype(np.float32)[None]
    found = quantize_rows(w, FOUR)
    assert found.rows.words.tobytes() == bytes.fromhex("1032547698badcfe" * 2)
    assert found.rows.scales.tobytes() == bytes.fromhex("0038")  # 0.5
    assert found.error_sum == found.error_max == 0
    mirrored = quantize_rows(-w, FOUR)  # scales may be negative: the same integers
    assert mirrored.rows.words.tobytes() == found.rows.words.tobytes()
    assert mirrored.rows.scales.tobytes() == bytes.fromhex("00b8")  # -0.5


def test_four_affine_bits_to_the_byte() -> None:
    w = (0.5 * np.tile(np.arange(16), 2) + 3).astype(np.float32)[None]
    found = quantize_rows(w, QuantizedForm(4, 32, "affine", "float16"))
    assert found.rows.words.tobytes() == bytes.fromhex("1032547698badcfe" * 2)
    assert found.rows.scales.tobytes() == bytes.fromhex("0038")  # 0.5
    assert found.rows.biases is not None
    assert found.rows.biases.tobytes() == bytes.fromhex("0042")  # 3
    assert found.error_sum == found.error_max == 0


def test_eight_bits_to_the_byte() -> None:
    integers = [-128, 127, 0, 1, -1, 64, -64, 100] * 4
    found = quantize_rows(0.25 * np.array([integers], np.float32), EIGHT)
    assert found.rows.words.tobytes() == bytes(value + 128 for value in integers)
    assert found.rows.scales.tobytes() == bytes.fromhex("0034")  # 0.25
    assert found.error_sum == 0


@pytest.mark.parametrize("form", PACKINGS, ids=repr)
def test_zeros_stay_zeros(form: QuantizedForm) -> None:
    found = quantize_rows(np.zeros((3, 128), np.float32), form)
    if found.rows.biases is None:
        assert set(found.rows.words.tobytes()) == {{4: 0x88, 8: 0x80}[form.bits]}
    assert not decoded(found.rows, form).any()
    assert not found.rows.scales.any()
    assert found.error_sum == found.square_sum == found.error_max == 0


@pytest.mark.parametrize("layout", ["symmetric", "affine"])
def test_a_single_value_is_kept(rng: Rng, layout: str) -> None:
    form = QuantizedForm(4, 64, layout, "float16")
    # an eighth of the smallest is still a normal float16, which has 11 bits
    for value in (rng.choice([-1, 1], 8) * 10 ** rng.uniform(-3, 3, 8)).astype(np.float32):
        w = np.zeros((1, 64), np.float32)
        w[0, rng.integers(64)] = value
        found = quantize_rows(w, form)
        np.testing.assert_allclose(decoded(found.rows, form), w, rtol=1e-3, atol=1e-3 * abs(value))


@pytest.mark.parametrize("layout", ["symmetric", "affine"])
def test_results_depend_neither_on_threads_nor_on_slices(rng: Rng, layout: str) -> None:
    form = QuantizedForm(4, 64, layout, "float16")
    w = rng.standard_normal((3000, 64)).astype(np.float32)
    whole = quantize_rows(w, form, threads=1)
    again = quantize_rows(w, form, threads=4)
    assert (whole.rows.words == again.rows.words).all()
    assert (whole.rows.scales == again.rows.scales).all()
    cut = int(rng.integers(1, 3000))
    parts = [quantize_rows(part, form) for part in (w[:cut], w[cut:])]
    assert (np.concatenate([part.rows.words for part in parts]) == whole.rows.words).all()
    assert sum(part.error_sum for part in parts) == pytest.approx(whole.error_sum)


@pytest.mark.parametrize("layout", ["symmetric", "affine"])
def test_values_beyond_float16_show_as_infinite_scales(layout: str) -> None:
    form = QuantizedForm(4, 32, layout, "float16")
    for value in (1e9, 1e20, 3e38):
        w = np.zeros((1, 96), np.float32)
        assert not quantize_rows(w, form).overflows
        w[0, 40], w[0, 50], w[0, 60] = value, -value, value
        found = quantize_rows(w, form)
        assert found.overflows
        assert np.isfinite(found.rows.scales).tolist() == [[True, False, True]], value
