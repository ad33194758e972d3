"""Kernels against their oracles: fresh shapes, values and tile sizes in every run."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from oracles import double
from oracles import whole_model as reference
from oracles.delta_rule import gated_delta
from oracles.whole_model import relative_error
from support.bundles import Rng
from support.compiled import require_compiled
from support.devices import arrays_of

from runtime.arrays.arrays import Arrays, CpuArrays
from runtime.arrays.attention_scratch import BLOCK
from runtime.arrays.compiled_attention import compile_for
from runtime.arrays.compiled_products import CompiledProducts
from runtime.arrays.dequantize import dense
from runtime.arrays.matrices import Matrices
from runtime.arrays.stored import Extent, Matrix
from runtime.arrays.values import Lora
from runtime.operations import convolution_kernel
from runtime.operations.attention_kernel import AttentionBlocks, CompiledBlocks
from runtime.operations.base import Call
from runtime.operations.execution import materialized_bytes
from runtime.operations.gated_delta import CHUNK, SEGMENT, GatedDelta, states_kept
from runtime.operations.gated_delta_kernel import DeltaRule
from runtime.operations.head_kernel import HeadKernel
from runtime.operations.linear_kernel import LoraProducts
from runtime.operations.logits_kernel import LogitsKernel, Shaping
from runtime.operations.prefix_kernel import Prefix, Scoring
from runtime.operations.values import T
from runtime.plan.lower import rows_at_once
from runtime.storage.weights import Tile, Weights

CLOSE = 1e-5
LAYOUTS = [
    (bits, group, layout)
    for bits in (4, 8)
    for group in (32, 64, 128)
    for layout in ("symmetric", "affine")
]
FLOATS = [(32, 0, "float32"), (16, 0, "float16"), (16, 0, "bfloat16")]


def stored(
    folder: Path, rng: Rng, rows: int, groups: int, bits: int, group_size: int, layout: str
) -> tuple[Weights, Matrix, np.ndarray]:
    """A random matrix in a weights file, and its values (R, C) in float64 by the format's words.

    `layout` is one of the format's, or the type of values in floating point.
    """
    if not group_size:
        return stored_floats(folder, rng, rows, groups * 23, bits, layout)
    columns = groups * group_size
    codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint32)
    per_word = 32 // bits
    lanes = codes.reshape(rows, -1, per_word) << (bits * np.arange(per_word, dtype=np.uint32))
    words = np.bitwise_or.reduce(lanes, axis=2).astype("<u4")
    dtype = {"symmetric": "float16", "affine": str(rng.choice(["float32", "bfloat16"]))}[layout]
    # symmetric scales may be negative
    scales = rng.standard_normal((rows, groups)) / (1 << bits)
    biases = rng.standard_normal((rows, groups))
    parts = [words, _stored_floats(scales, dtype), _stored_floats(biases, dtype)]
    blob, extents = b"", []
    for part, stored_as in zip(parts, ("uint32", dtype, dtype), strict=True):
        blob += bytes(-len(blob) % 64)
        extents.append(Extent(len(blob), part.nbytes, stored_as, part.shape))
        blob += part.tobytes()
    weights = weights_of(folder, blob)
    symmetric = layout == "symmetric"
    matrix = Matrix(
        rows, columns, bits, group_size, layout, *extents[:2], None if symmetric else extents[2]
    )
    exact_scales = _exact(parts[1], dtype)
    offset = -(2.0 ** (bits - 1)) * exact_scales if symmetric else _exact(parts[2], dtype)
    grouped = codes.reshape(rows, groups, group_size)
    values = grouped * exact_scales[..., None] + offset[..., None]
    return weights, matrix, values.reshape(rows, columns)


def stored_floats(
    folder: Path, rng: Rng, rows: int, columns: int, bits: int, dtype: str
) -> tuple[Weights, Matrix, np.ndarray]:
    """A random matrix in floating point, which does not begin where the file does."""
    part = _stored_floats(rng.standard_normal((rows, columns)), dtype)
    extent = Extent(64, part.nbytes, dtype, part.shape)
    weights = weights_of(folder, bytes(64) + part.tobytes())
    return weights, Matrix(rows, columns, bits, 0, "float", extent), _exact(part, dtype)


def weights_of(folder: Path, blob: bytes) -> Weights:
    path = folder / "weights.bin"
    path.write_bytes(blob)
    manifest = SimpleNamespace(blocks=(), block_types={}, weights_nbytes=len(blob))
    return Weights(SimpleNamespace(manifest=manifest, weights_path=path, holders=None))  # type: ignore[arg-type]


def _stored_floats(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _exact(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def tiles_of(
    weights: Weights, matrix: Matrix, arithmetic: str, values: int, arrays: Arrays
) -> Matrices:
    """The matrix in tiles of at most so many values."""
    rows = rows_at_once(matrix.rows, matrix.columns, values)
    return Matrices(weights, arrays, arithmetic == "packed", {matrix.packed.offset: rows})


def normal(rng: Rng, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def close(found: Any, expected: Any, bound: float = CLOSE) -> None:
    assert tuple(found.shape) == tuple(expected.shape)
    assert reference.relative_error(found, expected) <= bound


# --- dequantizing -----------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group", "layout"), [*LAYOUTS, *FLOATS])
def test_dequantized_values_are_the_formats(
    tmp_path: Path, rng: Rng, arrays: Arrays, bits: int, group: int, layout: str
) -> None:
    rows, groups = int(rng.integers(1, 40)), int(rng.integers(1, 4))
    weights, matrix, values = stored(tmp_path, rng, rows, groups, bits, group, layout)
    tile = weights.tile(matrix, 0, rows)
    found = np.array(dense(tile, bits, arrays)).astype(np.float64)
    by_mlx = np.array(reference.dequantized(weights, matrix)).astype(np.float64)
    if layout != "affine":  # float16 times a few bits: every product is exact in float32
        assert (found == values).all()
        assert (by_mlx == values).all()
    else:
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(by_mlx, values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bits", "group", "layout"), [(4, 32, "affine"), *FLOATS])
def test_tiles_and_gathered_rows_are_rows_of_the_matrix(
    tmp_path: Path, rng: Rng, arrays: Arrays, bits: int, group: int, layout: str
) -> None:
    weights, matrix, values = stored(tmp_path, rng, 37, 2, bits, group, layout)
    start, stop = sorted(rng.choice(38, 2, replace=False).tolist())
    tile = dense(weights.tile(matrix, start, stop), bits, arrays)
    np.testing.assert_allclose(np.array(tile), values[start:stop], atol=1e-5)
    rows = rng.integers(0, 37, 50)
    gathered = tiles_of(weights, matrix, "unpacked", 1000, arrays).rows(matrix, rows)
    np.testing.assert_allclose(np.array(gathered), values[rows], atol=1e-5)


@pytest.mark.parametrize(("bits", "group", "layout"), FLOATS)
def test_of_a_float_tile_only_the_float32_values_stay(
    tmp_path: Path, rng: Rng, arrays: Arrays, bits: int, group: int, layout: str
) -> None:
    """While it is multiplied; what the file holds is freed before."""
    weights, matrix, _ = stored(tmp_path, rng, 400, 20, bits, group, layout)
    matrices = tiles_of(weights, matrix, "unpacked", 1 << 30, arrays)
    gc.collect()
    before = mx.get_active_memory()
    tile = matrices.tile(matrix, 0, matrix.rows)
    taken = mx.get_active_memory() - before
    expected = 4 * matrix.rows * matrix.columns
    # an NVIDIA GPU frees what an operation has read a moment after it has ended
    late = matrix.packed.nbytes if mx.cuda.is_available() else 0
    assert expected <= taken < 1.1 * expected + late
    assert tile.values.shape == (matrix.rows, matrix.columns)


def test_matrices_are_materialized_once(tmp_path: Path, rng: Rng) -> None:
    weights, matrix, values = stored(tmp_path, rng, 20, 2, 4, 32, "symmetric")
    plain = tiles_of(weights, matrix, "unpacked", 500, CpuArrays())
    ranges = list(plain.ranges(matrix))
    assert [stop - start for start, stop in ranges] == [7, 7, 6]
    assert plain.tile(matrix, *ranges[0]) is not plain.tile(matrix, *ranges[0])
    kept = replace(plain, materialized={})
    kept.materialize([matrix])
    tiles = [kept.tile(matrix, *both) for both in ranges]
    assert [kept.tile(matrix, *both) for both in ranges] == tiles
    for tile, (start, stop) in zip(tiles, ranges, strict=True):
        assert (np.array(tile.values) == values[start:stop]).all()


@pytest.mark.parametrize(("bits", "group", "layout"), LAYOUTS)
def test_materialized_weights_are_allocated_before_the_first_is_dequantized(
    tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch, bits: int, group: int, layout: str
) -> None:
    """Else they lie between the holes that dequantizing leaves in the heap."""
    weights, matrix, _ = stored(tmp_path, rng, 64, 4, bits, group, layout)
    matrices = tiles_of(weights, matrix, "unpacked", 500, CpuArrays())
    ranges = list(matrices.ranges(matrix))
    plain = [matrices.tile(matrix, *both) for both in ranges]
    allocated: list[int] = []
    read = weights.tile

    def noted(*place: Any) -> Tile:
        allocated.append(mx.get_active_memory())
        return read(*place)

    monkeypatch.setattr(weights, "tile", noted)
    before = mx.get_active_memory()
    matrices.materialize([matrix])
    assert len(allocated) == len(ranges) > 1
    assert allocated[0] - before >= materialized_bytes(matrix)
    for tile, both in zip(plain, ranges, strict=True):
        same = matrices.tile(matrix, *both)
        pairs = [(same.values, tile.values)]
        if tile.shift is not None:
            assert same.shift is not None
            pairs.append((same.shift, tile.shift))
        assert all(mx.array_equal(one, other) for one, other in pairs)
    assert len(allocated) == len(ranges)


# --- linear -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["unpacked", "packed"])
@pytest.mark.parametrize(("bits", "group", "layout"), [*LAYOUTS, *FLOATS])
@pytest.mark.parametrize("extras", [(), ("bias", "lora")], ids="+".join)
def test_linear_and_its_backward(
    tmp_path: Path,
    rng: Rng,
    arrays: Arrays,
    bits: int,
    group: int,
    layout: str,
    arithmetic: str,
    extras: tuple[str, ...],
) -> None:
    rows, groups, length = (int(n) for n in rng.integers(1, (60, 4, 20)))
    weights, matrix, values = stored(tmp_path, rng, rows, groups, bits, group, layout)
    columns, rank = matrix.columns, int(rng.integers(1, 9))
    x, dy = normal(rng, length, columns), normal(rng, length, rows)
    bias = normal(rng, rows) if "bias" in extras else None
    a, b, scale = normal(rng, columns, rank), normal(rng, rank, rows), float(rng.uniform(0.1, 4))
    lora = Lora(a, b, scale) if "lora" in extras else None
    values_at_once = int(rng.integers(1, 2 * rows * columns))
    products = LoraProducts(tiles_of(weights, matrix, arithmetic, values_at_once, arrays))
    w = mx.array(values.astype(np.float32))
    factor = scale if lora else 0.0

    def oracle(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return reference.linear(x, w, bias, a, b, factor)

    (y,), (dx, da, db) = mx.vjp(oracle, [x, a, b], [dy])
    close(products.forward(x, matrix, bias, lora), y)
    dy_b = None if lora is None else products.through_b(dy, lora)
    added = None if lora is None or dy_b is None else products.lora_input(lora, dy_b)
    found = products.backward_input(dy, matrix, added)
    if lora is not None and dy_b is not None:
        found_a, found_b = products.backward_lora(x, dy, lora, dy_b)
        close(found_a, da)
        close(found_b, db)
    close(found, dx)


@pytest.mark.parametrize(("bits", "group", "layout"), [one for one in LAYOUTS if one[1] > 32])
def test_an_nvidia_gpu_multiplies_by_halves_of_large_groups(
    tmp_path: Path,
    rng: Rng,
    arrays: Arrays,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    group: int,
    layout: str,
) -> None:
    taken, multiply = [], mx.quantized_matmul

    def watched(x: mx.array, w: mx.array, scales: mx.array, *rest: Any, **more: Any) -> mx.array:
        mx.eval(scales)
        assert memoryview(scales).c_contiguous
        taken.append((more["group_size"], scales.shape[1]))
        return multiply(x, w, scales, *rest, **more)

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "quantized_matmul", watched)
    test_linear_and_its_backward(tmp_path, rng, arrays, bits, group, layout, "packed", ("bias",))
    assert taken and all(size == 32 or (size == 64 and count > 1) for size, count in taken)


# --- attention --------------------------------------------------------------------------------


class Attending(NamedTuple):
    """Ways to attend, `of` a number of queries at once, and to sequences of less than `longest`.

    Of 4 queries it takes `unit` at once.
    """

    of: Callable[[int], AttentionBlocks | CompiledBlocks]
    arrays: Arrays
    longest: int = 40
    unit: int = 4


@pytest.fixture(params=["cpu", "gpu", "compiled"])
def attending(request: pytest.FixtureRequest) -> Attending:
    """On a device's arrays, or by compiled code, which has tiles of its own."""
    if request.param == "compiled":
        require_compiled()
        compile_for([None, 2.5])
        cpu = CpuArrays()
        by = CompiledBlocks(CompiledProducts(cpu, 3).team, cpu)
        return Attending(lambda _: by, cpu, 300, BLOCK)
    arrays = arrays_of(request.param)
    return Attending(lambda block: AttentionBlocks(block, arrays), arrays)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_and_its_backward(
    rng: Rng,
    attending: Attending,
    heads: int,
    groups: int,
    window: int | None,
    block: int,
    packed: bool,
) -> None:
    """In a sequence that is one row, and in one of packed rows, which attention does not cross."""
    length, width, value_width = (
        int(n) for n in rng.integers((1, 1, 1), (attending.longest, 20, 20))
    )
    q = normal(rng, 1, heads, length, width)
    k = normal(rng, 1, groups, length, width)
    v = normal(rng, 1, groups, length, value_width)
    d_out = normal(rng, 1, heads, length, value_width)
    scale = float(rng.uniform(0.05, 1))
    numbers = np.sort(rng.integers(0, 5, length)) if packed else np.zeros(length, int)
    starts = np.searchsorted(numbers, numbers).astype(np.int32) if packed else None
    kernel = attending.of(block)
    out, lse = kernel.forward(q, k, v, Scoring(scale, window, starts=starts))
    (expected,), gradients = mx.vjp(
        lambda q, k, v: reference.attention(q, k, v, scale, window, mx.array(numbers)),
        [q, k, v],
        [d_out],
    )
    close(out, expected)
    found = kernel.backward(q, k, v, out, lse, d_out, Scoring(scale, window, starts=starts))
    # one key: softmax is constant and dq, dk are zero up to rounding
    floor = 1e-5 * float(mx.linalg.norm(d_out.reshape(-1)))
    for mine, theirs in zip(found, gradients, strict=True):
        assert mine.shape == theirs.shape
        difference = float(mx.linalg.norm((mine - theirs).reshape(-1)))
        assert difference <= CLOSE * float(mx.linalg.norm(theirs.reshape(-1))) + floor


@pytest.mark.parametrize(
    ("prefix", "cap", "sunk"), [(0, 2.5, 0), (3, 2.5, 1), (0, None, 1), (0, None, 100)]
)
def test_attention_with_a_prefix_a_cap_and_sinks_and_its_backward(
    rng: Rng, attending: Attending, prefix: int, cap: float | None, sunk: float
) -> None:
    heads, groups, length, width = 6, 3, attending.longest // 2 + 3, 8
    window = None if prefix else length // 3
    sinks = normal(rng, heads) * sunk if sunk else None
    numbers = np.sort(rng.integers(0, 3, length))
    starts = None if prefix else np.searchsorted(numbers, numbers).astype(np.int32)
    rows = None if prefix else mx.array(numbers)  # a prefix is seen from every row
    q = normal(rng, 1, heads, length, width) * 2
    k, v = (normal(rng, 1, groups, prefix + length, width) for _ in range(2))
    d_out = normal(rng, 1, heads, length, width)
    before = mx.zeros((1, heads, prefix, width))

    def whole(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        padded = mx.concatenate([before, q], axis=2)  # the prefix lies before all tokens
        return reference.attention(padded, k, v, 0.7, window, rows, cap, sinks)[:, :, prefix:]

    (expected,), gradients = mx.vjp(whole, [q, k, v], [d_out])
    parts = [part[0, :, None, :prefix] for part in (k, v)]
    further = Prefix(*parts, attending.arrays) if prefix else None
    kernel = attending.of(5)
    keys, values = k[:, :, prefix:], v[:, :, prefix:]
    scoring = Scoring(0.7, window, further, cap, sinks, starts)
    out, lse = kernel.forward(q, keys, values, scoring)
    close(out, expected)
    dq, dk, dv, *rest = kernel.backward(q, keys, values, out, lse, d_out, scoring)
    joined = [mx.concatenate([own[None], d], 2) for own, d in zip(rest, (dk, dv), strict=False)]
    for mine, theirs in zip([dq, *(joined or (dk, dv))], gradients, strict=True):
        close(mine, theirs)


def test_attention_with_huge_scores_stays_finite(rng: Rng, attending: Attending) -> None:
    q, k, v = (normal(rng, 1, 2, 21, 8) * factor for factor in (100, 100, 1))
    kernel = attending.of(5)
    out, lse = kernel.forward(q, k, v, Scoring(1.0, 6))
    close(out, reference.attention(q, k, v, 1.0, 6), 1e-4)
    for gradient in kernel.backward(q, k, v, out, lse, normal(rng, *out.shape), Scoring(1.0, 6)):
        assert mx.isfinite(gradient).all()


def test_attention_sees_neither_the_future_nor_beyond_its_window(
    rng: Rng, attending: Attending
) -> None:
    q, k, v = (normal(rng, 1, 2, 30, 8) for _ in range(3))
    kernel = attending.of(4)
    out, _ = kernel.forward(q, k, v, Scoring(0.3, 5))
    far = mx.arange(30)[None, None, :, None]
    outside = (far > 20) | (far <= 15)
    keys, values = mx.where(outside, 1e3, k), mx.where(outside, -1e3, v)
    moved, _ = kernel.forward(q, keys, values, Scoring(0.3, 5))
    assert mx.array_equal(out[:, :, 20], moved[:, :, 20])


@pytest.mark.parametrize("window", [None, 5])
def test_attention_does_not_read_the_rows_beside(
    rng: Rng, attending: Attending, window: int | None
) -> None:
    """What other rows hold changes no bit of this one."""
    starts = np.repeat([0, 7, 20, 26], [7, 13, 6, 4]).astype(np.int32)
    q, k, v, d_out = (normal(rng, 1, 2, 30, 8) for _ in range(4))
    inside = (mx.arange(30) >= 7) & (mx.arange(30) < 20)
    kernel = attending.of(4)

    def row(k: mx.array, v: mx.array) -> list[mx.array]:
        scoring = Scoring(0.3, window, starts=starts)
        out, lse = kernel.forward(q, k, v, scoring)
        found = [out, *kernel.backward(q, k, v, out, lse, d_out, scoring)]
        return [one[:, :, 7:20] for one in found]

    moved = [mx.where(inside[None, None, :, None], x, 1e3) for x in (k, v)]
    for one, other in zip(row(k, v), row(*moved), strict=True):
        assert mx.array_equal(one, other)


def test_rows_before_a_block_of_queries_cost_nothing(rng: Rng, attending: Attending) -> None:
    """Their keys are not even multiplied: numbers that no mask could take away do not show."""
    first, second, length = 2 * attending.unit, 5 * attending.unit, 7 * attending.unit + 2
    counts = np.diff([0, first, second, length])
    starts = np.repeat([0, first, second], counts).astype(np.int32)
    q, k, v, d_out = (normal(rng, 1, 2, length, 8) for _ in range(4))
    kernel = attending.of(4)
    before = (mx.arange(length) < first)[None, None, :, None]
    k, v = (mx.where(before, mx.nan, x) for x in (k, v))
    out, lse = kernel.forward(q, k, v, Scoring(0.3, starts=starts))
    for one in (out, *kernel.backward(q, k, v, out, lse, d_out, Scoring(0.3, starts=starts))):
        assert mx.isnan(one[:, :, :first]).all()
        assert mx.isfinite(one[:, :, first:]).all()


# --- gated delta rule -------------------------------------------------------------------------


def of_rule(rng: Rng, length: int, groups: int, heads: int) -> list[mx.array]:
    """q, k, v, log a and b as models have them: keys of length 1, decays from none to nearly all.

    Keys are alike, so that a state that is not corrected by what it holds would grow.
    """
    width, value_width = (int(n) for n in rng.integers(1, 20, 2))
    q, k = (normal(rng, 1, length, groups, width) for _ in range(2))
    k = k + float(rng.choice([0, 3]))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = normal(rng, 1, length, heads, value_width)
    decay = -0.1 * mx.exp(2 * normal(rng, 1, length, heads))
    return [q, k, v, decay, mx.sigmoid(normal(rng, 1, length, heads))]


@pytest.mark.parametrize(("heads", "groups", "packed"), [(1, 1, True), (4, 2, False), (4, 2, True)])
def test_the_gated_delta_rule_and_its_backward(
    rng: Rng, arrays: Arrays, heads: int, groups: int, packed: bool
) -> None:
    """Over part of a chunk, and over more than two segments, token by token and by autograd."""
    for length in (int(rng.integers(1, CHUNK)), 2 * CHUNK * SEGMENT + 9):
        inputs = of_rule(rng, length, groups, heads)
        dy = normal(rng, *inputs[2].shape)
        numbers = np.sort(rng.integers(0, 4, length)) if packed else np.zeros(length, int)
        starts = np.searchsorted(numbers, numbers).astype(np.int32)
        begins = {*starts.tolist()}
        (expected,), gradients = mx.vjp(lambda *x, rows=begins: gated_delta(*x, rows), inputs, [dy])
        rule = DeltaRule(arrays)
        y, states = rule.forward(inputs, starts if packed else None, keeps=True)
        close(y, expected)
        assert len(states) <= states_kept(length)
        found = rule.backward(inputs, states, dy, starts if packed else None)
        for mine, theirs in zip(found, gradients, strict=True):
            assert mine.shape == theirs.shape
            assert relative_error(mine, theirs) <= CLOSE


def test_the_gated_delta_rule_is_as_exact_if_nearly_all_decays(rng: Rng, arrays: Arrays) -> None:
    """The gradient of log a too, of which little is left between tokens; against float64."""
    q, k, v, decay, beta = of_rule(rng, 3 * CHUNK + 5, 2, 4)
    inputs = [q, k, v, -10 * mx.exp(normal(rng, *decay.shape)), beta]
    dy = normal(rng, *inputs[2].shape)
    with double.computing():
        doubles = [double.widened(array) for array in (*inputs, dy)]
        _, expected = mx.vjp(lambda *x: gated_delta(*x), doubles[:-1], doubles[-1:])
        mx.eval(expected)
    rule = DeltaRule(arrays)
    _, states = rule.forward(inputs, None, keeps=True)
    for mine, theirs in zip(rule.backward(inputs, states, dy), expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-6


@pytest.mark.parametrize("shape", [(2, 1, 8), (2, 1, 32), (4, 2, 8), (4, 1, 64)], ids=str)
def test_the_gated_delta_rule_s_backward_takes_no_more_than_is_planned(
    rng: Rng, shape: tuple[int, int, int]
) -> None:
    """Of small heads too, whose squares (H, n, n) are most of it."""
    groups, repeats, width = shape
    length, heads = 2 * CHUNK, groups * repeats
    inputs = [normal(rng, 1, length, n, width) for n in (groups, groups, heads)]
    inputs += [-mx.abs(normal(rng, 1, length, heads)), mx.sigmoid(normal(rng, 1, length, heads))]
    dy, rule = normal(rng, *inputs[2].shape), DeltaRule(CpuArrays())
    names = ("q", "k", "v", "decay", "beta")
    values = {name: (1, T, *x.shape[2:]) for name, x in zip(names, inputs, strict=True)}
    call = Call(True, names, 1, length, values, str)
    _, states = rule.forward(inputs)
    mx.eval(inputs, dy, states)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = rule.backward(inputs, states, dy)
    taken = mx.get_peak_memory() - before - sum(x.nbytes for x in results)
    planned = GatedDelta(names, ("y",)).working_bytes(call, None)  # type: ignore[arg-type]
    assert 0.8 * planned < taken <= planned


def test_the_gated_delta_rule_does_not_read_the_rows_beside(rng: Rng, arrays: Arrays) -> None:
    """A packed row has the bits of the row alone, whatever other rows hold."""
    ends = [CHUNK // 2, 3 * CHUNK, 8 * CHUNK]  # the last row has more than one segment
    starts = np.repeat([0, *ends[:-1]], np.diff([0, *ends])).astype(np.int32)
    inputs, rule = of_rule(rng, ends[-1], 1, 2), DeltaRule(arrays)
    dy = normal(rng, *inputs[2].shape)
    y, states = rule.forward(inputs, starts, keeps=True)
    found = rule.backward(inputs, states, dy, starts)
    for start, stop in pairwise([0, *ends]):
        own = [array[:, start:stop] for array in inputs]
        alone, kept = rule.forward(own, None, keeps=True)
        assert mx.array_equal(y[:, start:stop], alone)
        gradients = rule.backward(own, kept, dy[:, start:stop])
        for mine, theirs in zip(found, gradients, strict=True):
            assert mx.array_equal(mine[:, start:stop], theirs)


# --- arrays -----------------------------------------------------------------------------------


def test_exponentials_below_the_largest(rng: Rng, arrays: Arrays) -> None:
    x = rng.standard_normal((40, 100)).astype(np.float32) * 20
    x[3, 7] = -1e30
    most = x.max(axis=-1, keepdims=True)
    given = mx.array(x)
    top = arrays.row_max(given)
    assert mx.array_equal(top, mx.array(most))
    found = np.array(arrays.exp_below(given, top)).astype(np.float64)
    exact = np.exp((x - most).astype(np.float64))
    bound = 3e-7 if isinstance(arrays, CpuArrays) else 1e-5  # that of MLX's own
    np.testing.assert_allclose(found, exact, rtol=bound, atol=1e-37)
    assert (found.max(axis=-1) == 1.0).all()
    assert found[3, 7] == 0.0


@pytest.mark.filterwarnings("error")
def test_what_is_no_number_stays_none_without_a_warning(arrays: Arrays) -> None:
    x = mx.array([[np.inf, 1.0], [np.nan, 0.0]])
    most = arrays.row_max(x)
    assert np.isnan(np.array(arrays.exp_below(x, most))).tolist() == [[True, False], [True, True]]


def test_parts_of_arrays_are_put_added_and_taken(rng: Rng, arrays: Arrays) -> None:
    x, part = rng.standard_normal((6, 10)), rng.standard_normal((6, 4))
    where = (slice(None), slice(1, 9, 2))
    whole = mx.array(x.astype(np.float32))
    mx.eval(whole)
    arrays.add_to(whole, where, mx.array(part.astype(np.float32)))
    x[where] += part
    np.testing.assert_allclose(np.array(whole), x, rtol=1e-5, atol=1e-6)
    arrays.put(whole, where, mx.array(part.astype(np.float32)) * 2)
    x[where] = part * 2
    np.testing.assert_allclose(np.array(whole), x, rtol=1e-5, atol=1e-6)
    taken = arrays.contiguous(whole, where)
    np.testing.assert_allclose(np.array(taken), part * 2, rtol=1e-5, atol=1e-6)
    mean, weights = rng.standard_normal((6, 1)), rng.standard_normal((6, 4))
    found = arrays.weighed(taken, mx.array(mean), mx.array(weights), 0.3)
    np.testing.assert_allclose(
        np.array(found), (part * 2 - mean) * weights * 0.3, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(np.array(whole), x, rtol=1e-5, atol=1e-6)


# --- convolution ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_and_its_backward(rng: Rng, arrays: Arrays, width: int, packed: bool) -> None:
    """Over rows shorter than the filter, and over more than two tiles of tokens."""
    for length in (int(rng.integers(1, 8)), int(rng.integers(130, 150))):
        channels = int(rng.integers(1, 20))
        x, dy = normal(rng, length, channels), normal(rng, length, channels)
        w = normal(rng, channels, width, 1)
        bias = normal(rng, channels) if rng.random() < 0.5 else None
        numbers = np.sort(rng.integers(0, 1 + length // 4, length)) if packed else None
        starts = None if numbers is None else np.searchsorted(numbers, numbers).astype(np.int32)
        of_rows = None if numbers is None else mx.array(numbers)
        (y,), (dx,) = mx.vjp(
            lambda x, w=w, b=bias, rows=of_rows: reference.convolution(x, w, b, rows), [x], [dy]
        )
        close(convolution_kernel.forward(x, w, bias, starts, arrays), y)
        close(convolution_kernel.backward(dy, w, starts, arrays), dx)


def test_convolution_does_not_read_the_rows_beside(rng: Rng, arrays: Arrays) -> None:
    """A packed row has the bits of the row alone, whatever other rows hold."""
    starts = np.repeat([0, 7, 20, 26], [7, 13, 6, 4]).astype(np.int32)
    x, dy, w = normal(rng, 30, 5), normal(rng, 30, 5), normal(rng, 5, 4, 1)
    row = slice(7, 20)
    alone = convolution_kernel.forward(x[row], w, None, None, arrays)
    assert mx.array_equal(convolution_kernel.forward(x, w, None, starts, arrays)[row], alone)
    alone = convolution_kernel.backward(dy[row], w, None, arrays)
    assert mx.array_equal(convolution_kernel.backward(dy, w, starts, arrays)[row], alone)


# --- head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["unpacked", "packed"])
@pytest.mark.parametrize(("bits", "group", "layout"), [*LAYOUTS, *FLOATS])
def test_head_loss_gradient_and_prediction(
    tmp_path: Path, rng: Rng, arrays: Arrays, bits: int, group: int, layout: str, arithmetic: str
) -> None:
    vocab, groups, count = (int(n) for n in rng.integers((2, 1, 1), (300, 4, 20)))
    weights, matrix, values = stored(tmp_path, rng, vocab, groups, bits, group, layout)
    w = mx.array(values.astype(np.float32))
    h = normal(rng, count, matrix.columns) * float(rng.choice([0.1, 1, 10]))
    targets = rng.integers(0, vocab, count)
    matrices = tiles_of(weights, matrix, arithmetic, 1000, arrays)
    kernel = HeadKernel(matrices, int(rng.integers(1, vocab + 50)))
    (trained,) = kernel.run([h], [targets], matrix, gradient=True, predictions=False)
    scored, half = kernel.run(
        [h, h[::2] + 0], [targets, targets[::2]], matrix, gradient=False, predictions=True
    )
    assert mx.array_equal(half.predicted, scored.predicted[::2])
    expected = reference.head(h, w, mx.array(targets))
    dh = mx.grad(lambda h: reference.head(h, w, mx.array(targets)).sum())(h)
    logits = np.array(h @ w.T)
    bound = CLOSE * max(1.0, float(np.abs(logits).max()))  # a loss is a difference of logits
    for result in (trained, scored):
        np.testing.assert_allclose(np.array(result.loss), np.array(expected), rtol=0, atol=bound)
    difference = float(mx.linalg.norm((trained.dh - dh).reshape(-1)))
    size = float(mx.linalg.norm(dh.reshape(-1)) + mx.linalg.norm(w[mx.array(targets)].reshape(-1)))
    # a logit's rounding, relative to its size, is a relative error of exp(logit)
    assert difference <= max(CLOSE, 2e-7 * float(np.abs(logits).max())) * size
    assert scored.dh is None
    assert trained.predicted is None
    best = logits[np.arange(count), np.array(scored.predicted)]
    assert (best >= logits.max(axis=1) - bound).all()


def check_head_adapter(
    kernel: HeadKernel,
    rng: Rng,
    h: mx.array,
    w: mx.array,
    matrix: Matrix,
    targets: np.ndarray,
    plain: Shaping,
) -> None:
    """A head with LoRA has the loss and gradients of a matrix with the product A B added."""
    a, b = normal(rng, matrix.columns, 3), normal(rng, 3, matrix.rows)
    shaping, slopes = replace(plain, lora=Lora(a, b, 0.5)), normal(rng, len(targets), 1)

    def losses(h: mx.array, a: mx.array, b: mx.array) -> mx.array:
        added = w + 0.5 * (a @ b).T
        return reference.head(h, added, mx.array(targets), plain.bias, plain.cap)

    (result,) = kernel.run([h], [targets], matrix, True, False, shapings=[shaping])
    close(result.loss, losses(h, a, b))
    close(result.dh, mx.grad(lambda h: losses(h, a, b).sum())(h))
    found = mx.zeros(a.shape), mx.zeros(b.shape)
    mx.eval(found)
    halves, log_sum = slice(0, 4), result.log_sum
    for part in (halves, slice(4, None)):
        kernel.adapter_gradients(
            [h[part]], [targets[part]], [slopes[part]], [log_sum[part]], matrix, shaping, found
        )
    whole = mx.grad(lambda a, b: (losses(h, a, b) * slopes[:, 0]).sum(), argnums=(0, 1))(a, b)
    for one, expected in zip(found, whole, strict=True):
        close(one, expected)


@pytest.mark.parametrize(
    ("biased", "cap"), [(False, None), (True, None), (False, 3.0), (True, 3.0)]
)
def test_head_with_a_bias_and_a_cap(
    tmp_path: Path, rng: Rng, arrays: Arrays, biased: bool, cap: float | None
) -> None:
    weights, matrix, values = stored(tmp_path, rng, 150, 2, 4, 64, "symmetric")
    w, h = mx.array(values.astype(np.float32)), normal(rng, 9, matrix.columns)
    bias = normal(rng, 150) if biased else None
    targets, shaping = rng.integers(0, 150, 9), Shaping(bias, cap)
    matrices = tiles_of(weights, matrix, "unpacked", 1000, arrays)
    kernel = HeadKernel(matrices, int(rng.integers(1, 200)))
    (result,) = kernel.run([h], [targets], matrix, True, True, shapings=[shaping])
    check_head_adapter(kernel, rng, h, w, matrix, targets, shaping)
    close(result.loss, reference.head(h, w, mx.array(targets), bias, cap))
    close(result.dh, mx.grad(lambda h: reference.head(h, w, mx.array(targets), bias, cap).sum())(h))
    logits = h @ w.T if bias is None else h @ w.T + bias
    logits = logits if cap is None else cap * mx.tanh(logits / cap)
    found = LogitsKernel(matrices).run(h[:1], matrix, shaping)
    np.testing.assert_allclose(found, np.array(logits[0]), rtol=1e-4, atol=1e-5)
    best = np.array(logits)[np.arange(9), np.array(result.predicted)]
    np.testing.assert_allclose(best, np.array(logits).max(axis=1), rtol=1e-5)


def test_head_with_huge_logits_stays_finite(tmp_path: Path, rng: Rng) -> None:
    weights, matrix, values = stored(tmp_path, rng, 100, 2, 4, 64, "symmetric")
    h = normal(rng, 6, matrix.columns) * 1e4
    kernel = HeadKernel(tiles_of(weights, matrix, "unpacked", 1000, CpuArrays()), 7)
    logits = np.array(h).astype(np.float64) @ values.T
    targets = logits.argmin(axis=1)
    (result,) = kernel.run([h], [targets], matrix, gradient=True, predictions=True)
    np.testing.assert_allclose(np.array(result.loss), np.ptp(logits, axis=1), rtol=1e-4)
    assert mx.isfinite(result.dh).all()
    assert result.predicted.tolist() == logits.argmax(axis=1).tolist()


def test_relative_error_is_honest() -> None:
    assert reference.relative_error(mx.zeros(3), mx.zeros(3)) == 0
    assert math.isinf(reference.relative_error(mx.ones(3), mx.zeros(3)))
    assert reference.relative_error(mx.array([1.1, 0]), mx.array([1.0, 0])) == pytest.approx(0.1)
