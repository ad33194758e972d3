"""Compiled attention: its exponentials, any layout of its arrays, and any number of threads.

Its forward and backward are tested beside those of `AttentionBlocks`, in `test_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng
from support.compiled import machine_code_for, require_compiled
from support.models import CLOSE

from runtime.arrays import compiled_attention
from runtime.arrays.arrays import CpuArrays
from runtime.arrays.attention_text import REGISTERS, text_of
from runtime.arrays.compiled_products import CompiledProducts, registers
from runtime.arrays.vector_text import LOWEST, exp, tanh
from runtime.machine.compiling_process import image
from runtime.machine.llvm_code import Code, Integer, Pointer, Value, hexadecimal
from runtime.machine.machine_code import Text, compile_all, function
from runtime.operations.attention_kernel import CompiledBlocks
from runtime.operations.prefix_kernel import Prefix, Scoring

CAP = 30.0


@pytest.fixture(scope="module", autouse=True)
def compiled_at_once() -> None:
    require_compiled()
    settings = product((False, True), (None, 2.5), REGISTERS)
    compile_all(Text(text_of, how) for how in settings)


def curve(of: Callable[[Value], Value], x: np.ndarray) -> np.ndarray:
    """A curve of float32 numbers x, of which there are whole vectors."""

    def curves(code: Code, given: Pointer, made: Pointer, count: Integer) -> None:
        with code.loop(0, count, code.lanes) as at:
            (made + at).store(of((given + at).load()))

    made, x = np.empty_like(x), np.ascontiguousarray(x, np.float32)
    text = Code(registers().lanes).text(curves)
    function(text, 3)(x.ctypes.data, made.ctypes.data, len(x))
    return made


def test_exponentials_are_within_one_and_a_quarter_ten_millionths(rng: Rng) -> None:
    x = np.concatenate([rng.uniform(LOWEST, 1, 1 << 18), rng.uniform(-1, 1, 1 << 18)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    errors = curve(exp, x) / exact - 1
    assert np.abs(errors).max() <= 1.25e-7
    assert abs(errors.mean()) <= 1e-9
    ends = np.array([0, LOWEST, LOWEST - 1, -np.inf, *[np.nan] * 12], np.float32)
    ends.view(np.uint32)[-8:] += 1  # a nan too
    found = curve(exp, ends)
    assert found[0] == 1
    assert (found[1:4] <= 1.7e-38).all()
    assert np.isnan(found[4:]).all()


def test_caps_are_within_a_few_roundings_also_of_small_scores(rng: Rng) -> None:
    x = (CAP * 10.0 ** rng.uniform(-6, 2, 1 << 18) * rng.choice([-1, 1], 1 << 18)).astype(
        np.float32
    )
    exact = np.tanh(x.astype(np.float64) / CAP)
    assert np.abs(curve(lambda x: tanh(x, CAP), x) / exact - 1).max() <= 4e-7
    assert hexadecimal(1.0) == "0x3FF0000000000000"


def attention(threads: int) -> CompiledBlocks:
    arrays = CpuArrays()
    return CompiledBlocks(CompiledProducts(arrays, threads).team, arrays)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(
    ("heads", "groups", "prefix", "cap"), [(2, 2, 0, None), (8, 2, 0, None), (3, 1, 70, 2.5)]
)
@pytest.mark.parametrize(
    ("width", "value_width"), [(32, 32), (64, 64), (80, 80), (96, 128), (256, 256), (192, 128)]
)
def test_any_layout_and_any_number_of_threads(
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
    lanes: int,
    heads: int,
    groups: int,
    prefix: int,
    cap: float | None,
    width: int,
    value_width: int,
) -> None:
    """Arrays (T, H, D) that are seen as (H, T, D); the bits are the same from every team.

    Vectors of 16 lanes are computed in halves where the processor has none.
    """
    monkeypatch.setattr(compiled_attention, "registers", lambda: REGISTERS[lanes])
    length = int(rng.integers(130, 330))

    def drawn(count: int, columns: int) -> mx.array:
        rows = mx.array(rng.standard_normal((1, length, count, columns)).astype(np.float32))
        return rows.swapaxes(1, 2)

    q, k = drawn(heads, width), drawn(groups, width)
    v, d_out = drawn(groups, value_width), drawn(heads, value_width)
    arrays, parts = (
        CpuArrays(),
        [drawn(groups, n)[0, :, None, :prefix] for n in (width, value_width)],
    )
    mx.eval(q, k, v, d_out, parts)
    further = Prefix(*parts, arrays) if prefix else None
    window = None if prefix else int(rng.integers(2, 2 * length))  # of 1 no gradient is left
    scoring = Scoring(width**-0.5, window, further, cap)

    def whole(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        before = mx.zeros((1, heads, prefix, width))
        q = mx.concatenate([before, q], 2)
        return reference.attention(q, k, v, scoring.scale, window, None, cap)[:, :, prefix:]

    keys, values = (
        mx.concatenate([part[None, :, 0], own], 2) for part, own in zip(parts, (k, v), strict=True)
    )
    (expected,), (dq, *gradients) = mx.vjp(whole, [q, keys, values], [d_out])
    gradients = [dq, *(part[:, :, prefix:] for part in gradients)] + [
        part[0, :, :prefix] for part in gradients if prefix
    ]
    results = []
    for threads in (1, 2, 5):
        by = attention(threads)
        out, lse = by.forward(q, k, v, scoring)
        results.append([out, *by.backward(q, k, v, out, lse, d_out, scoring)])
    for mine, theirs in zip(results[0], [expected, *gradients], strict=True):
        assert reference.relative_error(mine, theirs) <= CLOSE
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert (np.array(one) == np.array(other)).all()


def test_long_rows_are_as_exact_as_short_ones(rng: Rng) -> None:
    """Of 3,000 keys, whose scores rise, so that the largest is found anew in every tile."""
    length, heads, width = 3000, 2, 64
    q, k, v = (rng.standard_normal((1, n, length, width)) for n in (heads, 1, 1))
    k += 0.02 * np.arange(length)[:, None] * q.mean(axis=(1, 2))[0]
    given = [mx.array(x.astype(np.float32)) for x in (q, k, v)]
    out, lse = attention(2).forward(*given, Scoring(0.125))
    q, k, v = (np.array(x).astype(np.float64) for x in given)
    scores = 0.125 * q[0] @ k[0].swapaxes(-1, -2)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    expected = p @ v[0] / total
    error = np.linalg.norm(np.array(out)[0] - expected) / np.linalg.norm(expected)
    assert error <= 1e-6
    exact = (top + np.log(total)).reshape(lse.shape)
    assert np.abs(np.array(lse) - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize(("processor", "lanes"), [("haswell", 8), ("skylake-avx512", 16)])
def test_other_processors_take_it_too(processor: str, lanes: int) -> None:
    """The code refers to nothing outside, which would not be there where it is mapped."""
    for backward, cap in product((False, True), (None, 50.0)):
        assert image(machine_code_for(processor, text_of(backward, cap, lanes)))
