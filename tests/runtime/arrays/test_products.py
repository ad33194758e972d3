"""Products in bfloat16: their type, their rounding, and whole gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from oracles.bfloat16 import ROUNDING, nearest
from support.bfloat16 import require_bfloat16, with_rounded_products
from support.bundles import Rng, Tiny
from support.models import adapters_of, mebp, model_of, rows_of

from runtime.arrays.arrays import Arrays, CpuArrays
from runtime.arrays.compiled_products import CompiledProducts, Rounded
from runtime.arrays.dequantize import dequantize
from runtime.arrays.weight_source import QuantizedTile
from runtime.core.errors import UsageError
from runtime.machine import compute_dtype
from runtime.machine.compute_dtype import Rates, choose

# Relative errors of gradients: 4.0 to 5.4 times the most of one rounding in 48 draws of these
# models. Factors' errors are independent, and some dozens lie between an adapter and the loss.
ON_THE_WAY = 10 * ROUNDING


def random(rng: Rng, *shape: int) -> mx.array:
    x = mx.array((rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)).astype(np.float32))
    mx.eval(x)
    return x


def tile_of(rng: Rng, bits: int, rows: int, columns: int, group: int) -> QuantizedTile:
    words = rng.integers(0, 1 << 32, (rows, columns * bits // 32), dtype=np.uint32)
    tile = QuantizedTile(mx.array(words), random(rng, rows, columns // group), None)
    mx.eval(tile.words)
    return tile


TILES: dict[str, tuple[int, Callable[[Rng], QuantizedTile]]] = {
    "4 bits": (4, lambda rng: tile_of(rng, 4, int(rng.integers(1, 70)), 192, 64)),
    "4 bits by 32": (4, lambda rng: tile_of(rng, 4, 130, 32, 32)),
    "many values": (4, lambda rng: tile_of(rng, 4, 70, 1024, 128)),
    "8 bits": (8, lambda rng: tile_of(rng, 8, int(rng.integers(1, 70)), 128, 32)),
}


@pytest.mark.parametrize("kind", TILES)
def test_values_are_codes_times_scales_on_every_device(rng: Rng, kind: str) -> None:
    bits, draw = TILES[kind]
    tile = draw(rng)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    stored = np.array(tile.words)[..., None] >> shifts & np.uint32(2**bits - 1)
    rows, groups = tile.scales.shape
    signed = stored.reshape(rows, groups, -1).astype(np.float32) - 2 ** (bits - 1)
    expected = (signed * np.array(tile.scales)[..., None]).reshape(rows, -1)
    for arrays in (CpuArrays(), Arrays()):
        assert (np.array(dequantize(tile, bits, arrays)) == expected).all()


def test_rounding_is_to_the_nearest_with_ties_to_even(rng: Rng) -> None:
    require_bfloat16()
    ours = CompiledProducts(CpuArrays(), 2, "bfloat16")
    bits = rng.integers(0x00800000, 0x7F000000, (500, 30)).astype(np.uint32)  # normal numbers
    bits[:250] &= 0xFFFF8000  # half of them ties, or exact
    x = mx.array(bits.view(np.float32))
    for part, expected in ((x, nearest(x)), (x[:, 1::2], nearest(x)[:, 1::2])):  # not contiguous
        pairs = Rounded(part).pairs(ours.team).view(np.uint16)
        values = pairs.astype(np.uint32) << 16
        assert (values[:, : part.shape[1]] == expected.view(np.uint32)).all()
        assert not values[:, part.shape[1] :].any()
    assert (np.array(x.astype(mx.bfloat16).astype(mx.float32)) == nearest(x)).all()


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
    """By the oracle on any machine, and where compiled code multiplies bfloat16 by that too."""
    bundle = tiny(family, layouts)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.in_double(reference.dense_model(bundle, adapters))
    _, exact = reference.gradients(dense, [(row.tokens, row.scored) for row in rows])

    def gradients(name: str, compiled: bool) -> dict[str, mx.array]:
        (tmp_path / name).mkdir()
        model = model_of(bundle, 32, slices=slices, compute_dtype="bfloat16", compiled=compiled)
        return mebp(model, adapters, rows, tmp_path / name)[1]

    def errors(found: dict[str, mx.array], expected: dict[str, mx.array]) -> list[float]:
        known = [name for name, value in expected.items() if value.any()]
        return [reference.relative_error(found[name], expected[name]) for name in known]

    with monkeypatch.context() as patched:
        with_rounded_products(patched)
        oracle = gradients("oracle", compiled=False)
    assert ROUNDING / 8 <= max(errors(oracle, exact)) <= ON_THE_WAY
    require_bfloat16()
    ours = gradients("ours", compiled=True)
    assert max(errors(ours, exact)) <= ON_THE_WAY
    # sums in another order let some factors be rounded the other way, and matrices in floating
    # point are not rounded
    assert max(errors(ours, oracle)) <= (1 if layouts else 0.6) * max(errors(oracle, exact))


def test_what_is_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_dtype, "lacking", lambda: "it is not here")
    assert choose("float32", "gpu", True).name == "float32"
    for packed, reason in ((False, "not here"), (True, "leave out --arithmetic packed")):
        with pytest.raises(UsageError, match=reason):
            choose("bfloat16", "cpu", packed)
        automatic = choose("auto", "cpu", packed)
        assert automatic.name == "float32" and reason in automatic.reason
    assert choose("bfloat16", "gpu", True).name == "bfloat16"
    assert choose("bfloat16", "cpu", False, here=False).name == "bfloat16"
    assert not Rates(100.0, 110.0).faster and Rates(100.0, 120.0).faster


def check_choice(monkeypatch: pytest.MonkeyPatch, measure: str, device: str) -> None:
    """The faster type is taken, by what is measured."""
    for fast, name in ((200.0, "bfloat16"), (110.0, "float32")):
        monkeypatch.setattr(compute_dtype, measure, lambda fast=fast: Rates(100.0, fast))
        chosen = choose("auto", device, device == "gpu")
        assert chosen.name == name and f"{fast:.0f} GFLOP/s in bfloat16" in chosen.reason


def test_automatic_is_what_is_faster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    require_bfloat16()
    rates = compute_dtype.measure()
    assert 1 < rates.float32 < 2000 and 1 < rates.bfloat16 < 4000
    check_choice(monkeypatch, "measure", "cpu")


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
    check_choice(monkeypatch, "measure_gpu", "gpu")


def test_a_processor_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_dtype.machine_code, "lacking", lambda: "")
    monkeypatch.setattr(compute_dtype, "cpu_flags", lambda: {"avx512f", "avx2"})
    with pytest.raises(UsageError, match="this processor has no products of bfloat16"):
        choose("bfloat16", "cpu", False)
    monkeypatch.setattr(compute_dtype, "cpu_flags", lambda: {"avx512f", "avx512_bf16"})
    assert choose("bfloat16", "cpu", False).name == "bfloat16"
    monkeypatch.setattr(compute_dtype.machine_code, "lacking", lambda: "llvmlite is not installed")
    with pytest.raises(UsageError, match="are compiled, and llvmlite is not installed"):
        choose("bfloat16", "cpu", False)
