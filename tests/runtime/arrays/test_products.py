"""Products by oneDNN against MLX's of the same factors, and whole gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from oracles import whole_model as reference
from oracles.bfloat16 import ROUNDING, RoundedProducts, nearest
from support.bfloat16 import require_onednn, with_rounded_products
from support.bundles import Rng, Tiny
from support.models import adapters_of, mebp, model_of, rows_of

from runtime.arrays.arrays import Arrays, CpuArrays
from runtime.arrays.dequantize import dequantize
from runtime.arrays.products import OneDnnProducts, Products, products_for
from runtime.arrays.weight_source import FloatTile, QuantizedTile, Tile
from runtime.core.errors import UsageError
from runtime.machine import compute_dtype, onednn
from runtime.machine.compute_dtype import Rates, choose
from runtime.machine.onednn import SHAPES, OneDnn

# Relative errors of gradients: 4.0 to 5.4 times the most of one rounding in 48 draws of these
# models. Factors' errors are independent, and some dozens lie between an adapter and the loss.
ON_THE_WAY = 10 * ROUNDING
SUMMED = 1e-6  # by which sums in float32 in another order differ, of random values


@pytest.fixture
def library() -> OneDnn:
    return require_onednn()


def random(rng: Rng, *shape: int) -> mx.array:
    x = mx.array((rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)).astype(np.float32))
    mx.eval(x)
    return x


def tile_of(rng: Rng, bits: int, rows: int, columns: int, group: int) -> Tile:
    words = rng.integers(0, 1 << 32, (rows, columns * bits // 32), dtype=np.uint32)
    tile = QuantizedTile(mx.array(words), random(rng, rows, columns // group), None)
    mx.eval(tile.words)
    return tile


def floats_of(rng: Rng, dtype: mx.Dtype) -> Tile:
    return FloatTile(random(rng, 37, 40).astype(dtype))


TILES: dict[str, tuple[int, Callable[[Rng], Tile]]] = {
    "4 bits": (4, lambda rng: tile_of(rng, 4, int(rng.integers(1, 70)), 192, 64)),
    "4 bits by 32": (4, lambda rng: tile_of(rng, 4, 130, 32, 32)),
    "many values": (4, lambda rng: tile_of(rng, 4, 70, 1024, 128)),
    "8 bits": (8, lambda rng: tile_of(rng, 8, int(rng.integers(1, 70)), 128, 32)),
    "float32": (32, lambda rng: floats_of(rng, mx.float32)),
    "float16": (16, lambda rng: floats_of(rng, mx.float16)),
    "bfloat16": (16, lambda rng: floats_of(rng, mx.bfloat16)),
}


@pytest.mark.parametrize("kind", TILES)
def test_products_are_those_of_the_same_factors(library: OneDnn, rng: Rng, kind: str) -> None:
    bits, draw = TILES[kind]
    tile, ours = draw(rng), OneDnnProducts(CpuArrays(), library)
    rows, width = ours.dequantize(tile, bits).shape
    tokens = int(rng.integers(1, 60))
    x, dy = random(rng, tokens, width), random(rng, tokens, rows)
    before = random(rng, tokens, rows)

    def products(by: Products) -> list[mx.array]:
        w, onto = by.dequantize(tile, bits), mx.array(before)
        return [
            by.multiply(by.factor(x), w, False, onto),
            by.multiply(by.factor(dy), w, True, None),
        ]

    for one, other in zip(products(ours), products(RoundedProducts(CpuArrays())), strict=True):
        assert reference.relative_error(one, other) <= SUMMED


@pytest.mark.parametrize("kind", ["4 bits", "4 bits by 32", "8 bits", "many values"])
def test_values_are_codes_times_scales_on_every_device(rng: Rng, kind: str) -> None:
    bits, draw = TILES[kind]
    tile = draw(rng)
    assert isinstance(tile, QuantizedTile)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    stored = np.array(tile.words)[..., None] >> shifts & np.uint32(2**bits - 1)
    rows, groups = tile.scales.shape
    signed = stored.reshape(rows, groups, -1).astype(np.float32) - 2 ** (bits - 1)
    expected = (signed * np.array(tile.scales)[..., None]).reshape(rows, -1)
    for arrays in (CpuArrays(), Arrays()):
        assert (np.array(dequantize(tile, bits, arrays)) == expected).all()


def test_rounding_is_to_the_nearest_with_ties_to_even(library: OneDnn, rng: Rng) -> None:
    ours = OneDnnProducts(CpuArrays(), library)
    bits = rng.integers(0x00800000, 0x7F000000, (50, 30)).astype(np.uint32)  # normal numbers
    bits[:25] &= 0xFFFF8000  # half of them ties, or exact
    x = mx.array(bits.view(np.float32))
    found = ours.factor(x).astype(np.uint32) << 16
    assert (found == nearest(x).view(np.uint32)).all()
    assert (found == np.array(ours.rounded(x)).view(np.uint32)).all()
    columns = mx.array(bits.view(np.float32))[:, 1::2]  # not contiguous
    assert (ours.factor(columns).astype(np.uint32) << 16 == found[:, 1::2]).all()


def test_more_shapes_than_are_kept_change_nothing(library: OneDnn, rng: Rng) -> None:
    ours = OneDnnProducts(CpuArrays(), library)
    w = ours.factor(random(rng, 8, 16))
    factors = [ours.factor(random(rng, tokens, 16)) for tokens in range(1, SHAPES + 9)]
    first, again = ([np.array(ours.multiply(x, w, False, None)) for x in factors] for _ in range(2))
    assert all((one == other).all() for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("family", "layouts", "slices"), [("qwen2", "", True), ("gemma3", "mixed", False)]
)
def test_gradients_lie_within_rounding_of_float64(
    tiny: Tiny,
    rng: Rng,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layouts: str,
    slices: bool,
) -> None:
    """By the oracle on any machine, and where there is oneDNN by that too."""
    bundle = tiny(family, layouts)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.in_double(reference.dense_model(bundle, adapters))
    _, exact = reference.gradients(dense, [(row.tokens, row.scored) for row in rows])

    def gradients(name: str) -> dict[str, mx.array]:
        (tmp_path / name).mkdir()
        model = model_of(bundle, 32, slices=slices, compute_dtype="bfloat16")
        return mebp(model, adapters, rows, tmp_path / name)[1]

    def errors(found: dict[str, mx.array], expected: dict[str, mx.array]) -> list[float]:
        known = [name for name, value in expected.items() if value.any()]
        return [reference.relative_error(found[name], expected[name]) for name in known]

    with monkeypatch.context() as patched:
        with_rounded_products(patched)
        oracle = gradients("oracle")
    assert ROUNDING / 8 <= max(errors(oracle, exact)) <= ON_THE_WAY
    require_onednn()
    ours = gradients("onednn")
    assert max(errors(ours, exact)) <= ON_THE_WAY
    # sums in another order let some factors be rounded the other way
    assert max(errors(ours, oracle)) <= max(errors(oracle, exact))


def test_what_is_asked_for_is_taken_or_refused() -> None:
    def missing() -> OneDnn:
        raise UsageError(f"{onednn.OPTION} is not here; give float32")

    assert choose("float32", "gpu", True, missing).name == "float32"
    for asked, device, packed, reason in (
        ("bfloat16", "cpu", False, "not here"),
        ("bfloat16", "cpu", True, "leave out --arithmetic packed"),
    ):
        with pytest.raises(UsageError, match=reason):
            choose(asked, device, packed, missing)
        automatic = choose("auto", device, packed, missing)
        assert automatic.name == "float32" and reason in automatic.reason
    assert choose("bfloat16", "gpu", True, missing).name == "bfloat16"
    assert not Rates(100.0, 110.0).faster and Rates(100.0, 120.0).faster


def test_automatic_on_a_gpu_is_what_is_faster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for it; packed products of each type are measured."""
    monkeypatch.setattr(mx, "gpu", mx.cpu)
    for name, value in {"TOKENS": 2, "GPU_ROWS": 64, "REPEATS": 2}.items():
        monkeypatch.setattr(compute_dtype, name, value)
    types: list[mx.Dtype] = []
    multiply = mx.quantized_matmul

    def seen(x: mx.array, *rest: mx.array, **how: bool) -> mx.array:
        types.append(x.dtype)
        return multiply(x, *rest, **how)

    monkeypatch.setattr(mx, "quantized_matmul", seen)
    rates = compute_dtype.measure_gpu()
    assert set(types) == {mx.float32, mx.bfloat16} and rates.float32 > 0 < rates.bfloat16
    for fast, name in ((200.0, "bfloat16"), (110.0, "float32")):
        monkeypatch.setattr(compute_dtype, "measure_gpu", lambda fast=fast: Rates(100.0, fast))
        chosen = choose("auto", "gpu", True, lambda why: pytest.fail("a GPU needs no library"))
        assert chosen.name == name and f"{fast:.0f} GFLOP/s in bfloat16" in chosen.reason


def test_a_processor_without_bfloat16_and_a_missing_library_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn, "_loaded", [])
    monkeypatch.setattr(onednn.sys, "platform", "linux")
    monkeypatch.setattr(onednn.platform, "machine", lambda: "x86_64")
    with pytest.raises(UsageError, match=r"this processor has no products of bfloat16"):
        onednn.load(1, {"avx512f", "avx2"})
    monkeypatch.setattr(onednn, "LIBRARY", "libdnnl-that-nobody-has.so")
    with pytest.raises(UsageError, match=r"pip install 'ondevice-tune\[onednn\]'"):
        onednn.load(1, {"avx512_bf16"})
    monkeypatch.setattr(onednn.platform, "machine", lambda: "arm64")
    with pytest.raises(UsageError, match=r"is built for Linux on x86-64, and this is"):
        onednn.load(1, {"avx512_bf16"})


def test_float32_needs_no_library() -> None:
    assert products_for("float32", CpuArrays(), None).factor(mx.ones((2, 2))).dtype == mx.float32


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (1, 5), (7, 1), (40, 24)])
def test_matrices_of_any_shape_and_order_are_multiplied(
    library: OneDnn, rng: Rng, rows: int, inner: int, columns: int
) -> None:
    for x_turned, w_turned, add in product((False, True), repeat=3):
        x, w = (
            rng.integers(-8, 9, shape[::-1] if turned else shape).astype(np.float32)
            for shape, turned in (((rows, inner), x_turned), ((inner, columns), w_turned))
        )
        x, w = (x.T if x_turned else x), (w.T if w_turned else w)
        whole = rng.integers(-8, 9, (rows, columns + 3)).astype(np.float32)
        expected = whole.copy()
        expected[:, 2:-1] = x @ w + (whole[:, 2:-1] if add else 0)
        library.multiply(*map(bits_of, (x, w)), whole[:, 2:-1], add=add)
        assert (whole == expected).all()  # integers of bfloat16, whose sums are exact


def bits_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits in bfloat16 of values that it has, in the same order in memory."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
