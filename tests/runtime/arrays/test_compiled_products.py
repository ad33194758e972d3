"""Compiled products with weights where they lie, against the operations of NumPy and MLX."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from oracles import whole_model as reference
from oracles.bfloat16 import nearest
from support.bundles import Rng, Tiny
from support.compiled import RandomMatrix, machine_code_for, require_compiled
from support.models import CLOSE, adapters_of, mebp, model_of, rows_of
from support.plans import COMPILED, plan_of, task_of

from runtime.arrays import compiled_products, packed_rows
from runtime.arrays.arrays import CpuArrays
from runtime.arrays.compiled_products import CompiledProducts, MapTile
from runtime.arrays.dequantize import dense
from runtime.arrays.product_text import NARROW, WIDE, Registers, rounding_text, text_of
from runtime.arrays.products import LowRank
from runtime.arrays.tile_products import Input, ReadyTile, RowSum
from runtime.engine.model import Model
from runtime.machine import compute_dtype, machine_code
from runtime.machine.compiling_process import image
from runtime.machine.machine_code import Text, compile_all
from runtime.machine.processor import cpu_flags
from runtime.machine.threads import prepare
from runtime.operations import gated_kernel
from runtime.operations.linear_kernel import LoraProducts
from runtime.run.session import open_session

SCALES = ("float16", "bfloat16", "float32")
SETTINGS = list(product((4, 8), (32, 64, 128), ("symmetric", "affine")))
REGISTERS = (WIDE, NARROW) if "avx512f" in cpu_flags() else (NARROW,)
HALF = "avx512_bf16" in cpu_flags()
KINDS = [
    *(pytest.param(each, "float32", id=f"{each.lanes} lanes") for each in REGISTERS),
    pytest.param(
        WIDE,
        "bfloat16",
        id="bfloat16",
        marks=pytest.mark.skipif(not HALF, reason="the processor lacks AVX512-BF16"),
    ),
]


def _scales(at: int) -> str:
    return SCALES[at % 3]


@pytest.fixture(scope="module", autouse=True)
def compiled_at_once() -> None:
    """A process for each text would take 0.2 s."""
    require_compiled()
    prepare()
    kinds = [*((each, 1) for each in REGISTERS), *([(WIDE, 2)] if HALF else [])]
    compile_all(
        Text(text_of, (by_rows, bits, size, _scales(at), layout == "affine", *kind))
        for at, (bits, size, layout) in enumerate(SETTINGS)
        for by_rows, kind in product((False, True), kinds)
    )


def _as_multiplied(values: mx.array, dtype: str) -> npt.NDArray[np.float64]:
    """Factors as products of a type take them, exactly."""
    return (nearest(values) if dtype == "bfloat16" else np.array(values)).astype(np.float64)


@pytest.mark.parametrize(("registers", "dtype"), KINDS)
@pytest.mark.parametrize("at", range(len(SETTINGS)))
def test_every_weight_is_that_of_the_reference(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, at: int, registers: Registers, dtype: str
) -> None:
    """The product with the identity has every bit of the weights, in either direction."""
    monkeypatch.setattr(compiled_products, "registers", lambda: registers)
    bits, size, layout = SETTINGS[at]
    weights = RandomMatrix(rng, bits, layout, size, _scales(at), most=150)
    ours = CompiledProducts(CpuArrays(), 2, dtype)
    for by_columns in (False, True):
        start, stop = weights.part(rng, by_columns)
        tile = MapTile(weights.matrix, weights.mapped(weights.matrix, start, stop, by_columns))
        weight = dense(weights.tile(start, stop, by_columns), bits, CpuArrays())
        expected = _as_multiplied(weight, dtype)
        across, down = (ours.factor(mx.eye(n)) for n in reversed(expected.shape))
        assert (expected == np.array(ours.multiply(across, tile, False, None)).T).all()
        assert (np.array(ours.multiply(down, tile, True, None)) == expected).all()


@pytest.mark.parametrize(("registers", "dtype"), KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 9, 10, 37, 200])
def test_sums_and_adapters_are_those_of_numpy(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, tokens: int, registers: Registers, dtype: str
) -> None:
    monkeypatch.setattr(compiled_products, "registers", lambda: registers)
    at = int(rng.integers(len(SETTINGS)))
    bits, size, layout = SETTINGS[at]
    weights = RandomMatrix(rng, bits, layout, size, _scales(at), most=150)
    start, stop = weights.part(rng, False)
    tile = MapTile(weights.matrix, weights.mapped(weights.matrix, start, stop, False))
    w = _as_multiplied(dense(weights.tile(start, stop, False), bits, CpuArrays()), dtype)
    rows, columns = w.shape

    def drawn(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    alone, both = (CompiledProducts(CpuArrays(), threads, dtype) for threads in (1, 3))
    for by_rows, rank in product((False, True), (0, 3, 130)):
        depth, width = (rows, columns) if by_rows else (columns, rows)
        x, onto, u, b = (
            drawn(tokens, depth), drawn(tokens, width), drawn(tokens, rank), drawn(rank, width)
        )  # fmt: skip
        added = LowRank(u, b) if rank else None
        expected = _as_multiplied(x, dtype) @ (w if by_rows else w.T)
        expected += np.array(u).astype(np.float64) @ np.array(b) if rank else 0
        given = both.factor(x)
        y = both.multiply(given, tile, by_rows, None, added)
        assert reference.relative_error(y, mx.array(expected)) <= CLOSE
        assert (np.array(y) == np.array(alone.multiply(given, tile, by_rows, None, added))).all()
        expected += np.array(onto)
        sums = both.multiply(given, tile, by_rows, onto, added)
        assert reference.relative_error(sums, mx.array(expected)) <= CLOSE
    a = drawn(rows + 4, 3)
    x, u = drawn(tokens, columns), drawn(tokens, 3)
    added = LowRank(u, a, transposed=True, columns=slice(2, 2 + rows))
    y = both.multiply(both.factor(x), tile, False, None, added)
    expected = _as_multiplied(x, dtype) @ w.T + np.array(u) @ np.array(a)[2 : 2 + rows].T
    assert reference.relative_error(y, mx.array(expected)) <= CLOSE


def _of_small_terms(rng: Rng, share: float) -> tuple[RandomMatrix, npt.NDArray[np.float32], float]:
    """A tall matrix, a row (1, R) of one large term and of small ones, and their product's first.

    The large term is 1 of the product, so that roundings beside it are alike. share: the size of
    the small ones' factors.
    """
    bits, size, layout = SETTINGS[0]
    weights = RandomMatrix(rng, bits, layout, size, _scales(0), most=30_001, least=30_000)
    rows = weights.matrix.rows
    w = np.array(dense(weights.tile(0, rows, False), bits, CpuArrays())).astype(np.float64)
    large, small = 1 / max(abs(w[0, 0]), 0.01), np.sign(w[:, :1]).T * share
    x = np.where(np.arange(rows) == 0, large, small).astype(np.float32)
    return weights, x, float((x.astype(np.float64) @ w)[0, 0])


@pytest.mark.parametrize("registers", REGISTERS, ids=lambda each: f"{each.lanes} lanes")
def test_long_sums_are_added_in_parts(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, registers: Registers
) -> None:
    """A head's gradient is one of its vocabulary, in which a small term alone would be lost."""
    monkeypatch.setattr(compiled_products, "registers", lambda: registers)
    weights, x, expected = _of_small_terms(rng, 2.0**-25)
    matrix = weights.matrix
    tile = MapTile(matrix, weights.mapped(matrix, 0, matrix.rows, False))
    y = CompiledProducts(CpuArrays(), 1).multiply(mx.array(x), tile, True, None)
    assert np.array(y)[0, 0] == pytest.approx(expected, rel=CLOSE)


def test_the_chunks_of_a_vocabulary_have_sums_of_their_own(rng: Rng) -> None:
    """Of parts of a chunk one after the other, each would be lost beside the sum so far."""
    weights, x, expected = _of_small_terms(rng, 2.0**-31.5)  # 128 are less than a rounding
    matrix, products, total = weights.matrix, CompiledProducts(CpuArrays(), 1), RowSum(CpuArrays())
    for start in range(0, matrix.rows, 2_000):
        values = weights.mapped(matrix, start, start + 2_000, False)
        tile = ReadyTile(matrix, products, None, MapTile(matrix, values), None)
        total.add(Input.of(mx.array(x[:, start : start + 2_000]), products), tile, mx.ones((1, 1)))
    assert np.array(total.result())[0, 0] == pytest.approx(expected, rel=1.5e-6)


def test_a_session_compiles_all_that_a_step_takes(
    tiny: Tiny, rng: Rng, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny("qwen2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_code.function.cache_clear()
    session = open_session(bundle, plan_of(bundle.manifest, task_of(32), machine=COMPILED))
    monkeypatch.setattr(machine_code, "_compiled", lambda *_: pytest.fail("a text was not there"))
    mebp(session.model(32), adapters_of(bundle, rng), rows_of(bundle, rng), tmp_path)


def test_matrices_that_are_taken_by_columns_take_no_copy_of_a_value(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen2")
    model = model_of(bundle, 32, slices=True, compiled=True)
    others = model_of(bundle, 32, slices=True)
    name = next(iter(model.lowered.execution.tile_columns))
    matrix = bundle.manifest.matrices[name]
    widths = matrix.columns, matrix.rows
    x, dy = (mx.array(rng.normal(size=(2000, n)).astype(np.float32)) for n in widths)
    mx.eval(x, dy)

    def both(model: Model) -> list[mx.array]:
        products = LoraProducts(model.matrices)
        return [products.forward(x, matrix, None, None), products.backward_input(dy, matrix)]

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ours = both(model)
    taken = mx.get_peak_memory() - before
    assert taken <= 1.1 * sum(each.nbytes for each in ours)
    for one, expected in zip(ours, both(others), strict=True):
        assert reference.relative_error(one, expected) <= CLOSE


def test_processors_without_bfloat16_read_such_scales() -> None:
    for bits, layout in product((4, 8), ("symmetric", "affine")):
        texts = (
            text_of(False, bits, 64, "bfloat16", layout == "affine", NARROW),
            text_of(True, bits, 64, "bfloat16", layout == "affine", NARROW),
            packed_rows.text_of(bits, 64, layout, "bfloat16", 4),
        )
        for text in texts:
            assert image(machine_code_for("haswell", text))


def test_processors_with_bfloat16_multiply_pairs() -> None:
    """On every machine, since the one at hand may have no such instructions."""
    products = [text_of(by_rows, 4, 32, "float16", True, WIDE, 2) for by_rows in (False, True)]
    rounding = machine_code_for("znver4", rounding_text(WIDE.lanes), readable=True)
    assert "vcvtneps2bf16" in rounding
    for text in (compute_dtype.text_of(2), *products):
        assert "vdpbf16ps" in machine_code_for("znver4", text, readable=True)


@pytest.mark.parametrize(
    ("family", "layouts", "slices"), [("qwen2", "", True), ("gemma3", "mixed", False)]
)
def test_gradients_are_those_without_compiled_code(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, layouts: str, slices: bool
) -> None:
    bundle = tiny(family, layouts)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)

    def gradients(compiled: bool) -> dict[str, mx.array]:
        (folder := tmp_path / str(compiled)).mkdir()
        model = model_of(bundle, 32, slices=slices, compiled=compiled)
        return mebp(model, adapters, rows, folder)[1]

    ours, others = gradients(True), gradients(False)
    for name, value in others.items():
        if value.any():
            assert reference.relative_error(ours[name], value) <= CLOSE, name


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("count", [21, 37, 20_000])
def test_gates_are_those_of_numpy(rng: Rng, activation: str, count: int) -> None:
    curve, shared = gated_kernel.CURVES[activation], CompiledProducts(CpuArrays(), 2).team
    g, u, d = (mx.array(rng.normal(size=(1, count)).astype(np.float32)) for _ in range(3))
    g = g * 8
    for parts in ((g,), (g, u)):
        y = gated_kernel.gated(curve, *parts, team=shared)
        assert reference.relative_error(y, gated_kernel.gated(curve, *parts)) <= 1e-6
        ours = gated_kernel.gated_vjp(curve, *parts, d, team=shared)
        for mine, other in zip(ours, gated_kernel.gated_vjp(curve, *parts, d), strict=True):
            assert reference.relative_error(mine, other) <= 1e-6
    far = mx.array([[-1e30, -200.0, 0.0, 200.0]])
    if activation == "silu":
        y = gated_kernel.gated(curve, far, team=shared)
        assert reference.relative_error(y, mx.array([[0.0, 0.0, 0.0, 200.0]])) <= 1e-6


ADDRESSES = """
import tracemalloc
import numpy as np
from runtime.arrays.compiled_products import address
array = np.zeros(4, np.float32)
tracemalloc.start()
assert {address(array) for _ in range(50_000)} == {array.ctypes.data}
print(tracemalloc.get_traced_memory()[1])
"""


def test_an_address_fills_no_table_of_interned_strings() -> None:
    """A full table moves, in the middle of a step to a place where values had room.

    In a process of its own: that of the tests may hold all strings that there would be.
    """
    words = [sys.executable, "-c", ADDRESSES]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 50_000
