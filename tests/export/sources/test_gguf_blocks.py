"""GGUF's blocks as packed rows: their values are those that the gguf library reads."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from support.gguf_files import QUANTIZED, Blocks, random_blocks

from export.sources import gguf_blocks
from export.sources.gguf_blocks import TRANSCODINGS, transcode
from export.stored import QuantizedForm, QuantizedRows, codes_of

Rng = np.random.Generator
ROWS, COLUMNS = 7, 768
HALF_UNIT = 2.0**-11  # relative error of rounding to float16
SMALLEST = 2.0**-25  # and the absolute one of its smallest numbers


@pytest.fixture(params=QUANTIZED)
def blocks(request: pytest.FixtureRequest, rng: Rng) -> Blocks:
    return random_blocks(rng, request.param, ROWS, COLUMNS)


def packed(blocks: Blocks) -> tuple[QuantizedForm, QuantizedRows]:
    known = TRANSCODINGS[blocks.type]
    assert known is not None
    return known.form, transcode(blocks.rows, blocks.type)


def magnitudes(form: QuantizedForm, rows: QuantizedRows) -> np.ndarray:
    """|scale * q| + |bias| of each value, which rounding the scales and biases is relative to."""
    codes = codes_of(rows.words, form.bits).astype(np.float64)
    scales, biases = (
        np.repeat(np.abs(part.astype(np.float64)), form.group_size, axis=1)
        for part in (rows.scales, rows.biases if rows.biases is not None else 0 * rows.scales)
    )
    if rows.biases is None:
        codes = np.abs(codes - 2 ** (form.bits - 1))
    return codes * scales + biases


def peaks(values: np.ndarray) -> np.ndarray:
    """The largest magnitude in the group of 32 of each value."""
    groups = np.abs(values).reshape(len(values), -1, 32).max(axis=2)
    return np.repeat(groups, 32, axis=1)


ROUNDED = {  # type -> how far a value may be from the library's
    "Q2_K": lambda form, rows, values: peaks(values) * (0.5 / 127 + 2 * HALF_UNIT) + 1e-5,
    "Q4_K": lambda form, rows, values: magnitudes(form, rows) * 1.01 * HALF_UNIT + 16e-8,
    "Q5_K": lambda form, rows, values: magnitudes(form, rows) * 1.01 * HALF_UNIT + 32e-8,
    # a step is less than twice the smallest one that reaches all values
    "Q6_K": lambda form, rows, values: peaks(values) * (1 / 127 + 2 * HALF_UNIT) + 1e-5,
}


def test_values_are_the_librarys(blocks: Blocks) -> None:
    form, rows = packed(blocks)
    values = rows.values(form)
    known = TRANSCODINGS[blocks.type]
    assert known is not None and known.is_exact == (blocks.type.name not in ROUNDED)
    if known.is_exact:
        np.testing.assert_array_equal(values, blocks.values)
        return
    error = np.abs(values - blocks.values.astype(np.float64))
    assert (error <= ROUNDED[blocks.type.name](form, rows, blocks.values)).all()
    assert error.any()


def test_types_are_stored_with_the_stated_packing(blocks: Blocks) -> None:
    name = blocks.type.name
    form, rows = packed(blocks)
    assert form == QuantizedForm(
        4 if name.startswith("Q4") else 8,
        128 if name == "Q3_K" else 32,
        "affine" if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else "symmetric",
        "float16",
    )
    assert rows.words.shape == (ROWS, COLUMNS * form.bits // 32)
    assert rows.words.dtype == np.uint32
    assert rows.scales.shape == (ROWS, COLUMNS // form.group_size)
    assert rows.scales.dtype == np.float16
    assert (rows.biases is None) == (form.layout == "symmetric")


def test_chunks_do_not_matter(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = packed(blocks)
    monkeypatch.setattr(gguf_blocks, "CHUNK_VALUES", 2 * 256)
    _, parts = packed(blocks)
    np.testing.assert_array_equal(parts.words, whole.words)
    np.testing.assert_array_equal(parts.scales, whole.scales)
    for row in range(ROWS):
        one = transcode(blocks.rows[row : row + 1], blocks.type)
        np.testing.assert_array_equal(one.words, whole.words[row : row + 1])


@pytest.mark.parametrize("factors", [(1, 1), (-5, 5), (2, 4), (30, 20), (-60, 45), (0, 9), (0, 0)])
def test_q6_k_is_exact_where_one_step_fits_both_groups(factors: tuple[int, int], rng: Rng) -> None:
    blocks = random_blocks(rng, "Q6_K", ROWS, COLUMNS)
    table = blocks.rows.reshape(-1, 210)
    table[:, 192:208] = np.tile(np.array(factors, np.int8), 8).view(np.uint8)
    form, rows = packed(blocks)
    error = np.abs(rows.values(form) - blocks.values)
    assert (error <= np.abs(blocks.values) * HALF_UNIT + 128 * SMALLEST).all()


def test_q6_k_is_never_worse_than_plain_rounding(rng: Rng) -> None:
    blocks = random_blocks(rng, "Q6_K", 8 * ROWS, COLUMNS)
    form, rows = packed(blocks)
    exact = blocks.values.astype(np.float64)
    ours = ((rows.values(form) - exact) ** 2).reshape(-1, 32).sum(axis=1)
    groups = exact.reshape(-1, 32)
    sides = np.sort(np.abs([groups.min(axis=1), groups.max(axis=1)]), axis=0)
    step = np.maximum(np.maximum(sides[1] / 128, sides[0] / 127), 1e-12)[:, None]
    plain = ((groups - np.rint(groups / step) * step) ** 2).sum(axis=1)
    of_scales = 32 * (sides[1] * HALF_UNIT + 128 * SMALLEST) ** 2  # stored as float16
    assert (np.sqrt(ours) <= np.sqrt(plain) + np.sqrt(of_scales)).all()


def test_zero_blocks_remain_zero(blocks: Blocks) -> None:
    blocks.rows[:] = 0
    form, rows = packed(blocks)
    assert not rows.values(form).any()


def test_a_number_that_is_not_finite_shows_in_the_scales(blocks: Blocks) -> None:
    """The export refuses a matrix whose scales or biases are not finite."""
    octets = gguf.GGML_QUANT_SIZES[blocks.type][1]
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(blocks.type.name, 0)
    table = blocks.rows.reshape(-1, octets)
    table[1] = 255
    table[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        _, rows = packed(blocks)
    assert not np.isfinite(rows.scales.astype(np.float32)).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0"])
def test_other_types_are_floats_to_the_export(name: str) -> None:
    assert GGMLQuantizationType[name] not in TRANSCODINGS
