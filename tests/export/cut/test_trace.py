"""Traces of functions: their signatures, what their results depend on, and the memory they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from support.models import Rng, relative

from export.cut.trace import serialize, trace
from export.cut.workspace import allocated_bytes, workspace_bytes

EPSILON = 1e-6


def test_signatures_depend_on_the_computation_alone() -> None:
    def function(x: mx.array, y: mx.array) -> list[mx.array]:
        return [mx.sin(x) * 2 + y]

    def same(a: mx.array, b: mx.array) -> list[mx.array]:
        unused = mx.cos(a)
        first = mx.sin(a)
        del unused
        return [first * 2 + b]

    def other_constant(x: mx.array, y: mx.array) -> list[mx.array]:
        return [mx.sin(x) * 3 + y]

    def other_wiring(x: mx.array, y: mx.array) -> list[mx.array]:
        return [mx.sin(y) * 2 + x]

    inputs = [mx.zeros((3, 4)), mx.zeros((3, 4))]
    signature = trace(function, inputs).signature
    for _ in range(30):  # names go on counting; single letters become two
        trace(other_wiring, inputs)
    assert trace(function, inputs).signature == signature
    assert trace(same, inputs).signature == signature
    assert trace(other_constant, inputs).signature != signature
    assert trace(other_wiring, inputs).signature != signature
    assert trace(function, [mx.zeros((3, 5)), mx.zeros((3, 5))]).signature != signature
    assert trace(lambda x: [x, mx.sin(x)], inputs[:1]).signature != (
        trace(lambda x: [mx.sin(x), x], inputs[:1]).signature
    )


def test_traces_know_dependencies_and_passes() -> None:
    traced = trace(lambda x, y, z: [x + z, y, z * 2], [mx.zeros(3), mx.zeros(4), mx.zeros(3)])
    assert traced.depends == (frozenset({0, 2}), frozenset({1}), frozenset({2}))
    assert traced.passes == (None, 1, None)
    assert traced.same == (None, None, None)
    assert traced.output_shapes == ((3,), (4,), (3,))


def test_traces_know_results_that_are_one_array() -> None:
    def several(x: mx.array) -> list[mx.array]:
        return [x * 2, (y := x + 1), x * 2, y, x, y]

    assert trace(several, [mx.zeros(3)]).same == (None, None, None, 1, None, 1)


def test_norms_of_wide_rows_are_those_of_float64(rng: Rng, tmp_path: Path) -> None:
    """MLX's own lose 4e-7 to 9e-7 of a row of 4,096 on a CPU."""
    x, weight, bias = (rng.standard_normal(shape) + 1 for shape in ((64, 4096), 4096, 4096))

    def norms(x: mx.array, weight: mx.array, bias: mx.array) -> list[mx.array]:
        norm = mx.fast.layer_norm(x, weight, bias, EPSILON)
        return [mx.fast.rms_norm(x, weight, EPSILON), norm]

    given = [mx.array(value.astype(np.float32)) for value in (x, weight, bias)]
    serialize(tmp_path / "norms", norms, given)
    x, weight, bias = (np.array(value, np.float64) for value in given)
    apart = x - x.mean(axis=-1, keepdims=True)
    roots = (np.sqrt((y * y).mean(axis=-1, keepdims=True) + EPSILON) for y in (x, apart))
    expected = x / next(roots) * weight, apart / next(roots) * weight + bias
    for found, y in zip(mx.import_function(str(tmp_path / "norms"))(*given), expected, strict=True):
        assert relative(np.array(found), y) <= 2e-7


def test_workspace_counts_what_is_alive_at_once() -> None:
    inputs = [mx.zeros((100,))]
    assert trace(lambda x: [mx.sin(x)], inputs).workspace_bytes == 0
    assert trace(lambda x: [mx.cos(mx.sin(x))], inputs).workspace_bytes == 0  # in its place
    both = trace(lambda x: [mx.sin(x) * mx.cos(x)], inputs).workspace_bytes
    assert both == 400  # of two, the result takes one's place
    summed = trace(lambda x: [mx.exp(x).sum()], inputs).workspace_bytes
    assert summed == 400  # a sum has another size
    viewed = trace(lambda x: [mx.abs(mx.sin(x).reshape(10, 10))], inputs).workspace_bytes
    assert viewed == 0
    kept = trace(lambda x: [(y := mx.sin(x)), mx.cos(y)], inputs).workspace_bytes
    assert kept == 0  # two outputs, neither in the other's place


def test_workspace_counts_that_a_slice_keeps_its_source() -> None:
    """As in a rotary embedding, whose halves are slices of one array."""

    def sliced(x: mx.array) -> list[mx.array]:
        return [mx.exp(x)[:10] * mx.concatenate([mx.cos(x), mx.sin(x)]).sum()]

    held = 400  # exp(x), while all else is computed
    assert trace(sliced, [mx.zeros((100,))]).workspace_bytes == held + 400 + 400 + 800 + 4 - 40


def test_what_is_allocated_counts_what_is_not_in_place() -> None:
    """In whole pages, and nothing is freed: a GPU's command buffer holds on to what it reads."""
    page, inputs = 16384, [mx.zeros((40, 100))]

    def allocated(function: Callable[[mx.array], list[mx.array]]) -> int:
        return trace(function, inputs).allocated_bytes

    assert allocated(lambda x: [mx.sin(x)]) == 0
    assert allocated(lambda x: [mx.cos(mx.sin(x))]) == 0  # in its place
    assert allocated(lambda x: [mx.exp(x).sum()]) == page
    assert allocated(lambda x: [(y := mx.exp(x)) * y + y]) == page  # read again later
    assert allocated(lambda x: [mx.exp(mx.exp(x).sum(axis=0)).sum()]) == 2 * page
    assert allocated(lambda x: [x.reshape(-1).sum()]) == 0
    assert allocated(lambda x: [x.T.reshape(-1).sum()]) == page  # a copy in another order


def test_results_that_are_an_inputs_memory_are_known() -> None:
    """As of heads, which have an axis of their own; a copy, or a part, is new memory."""
    inputs = [mx.arange(24.0).reshape(2, 12), mx.ones((2, 12))]

    def function(x: mx.array, y: mx.array) -> list[mx.array]:
        heads = y.reshape(2, 3, 4).transpose(1, 0, 2)
        return [heads, x * 2, heads.reshape(6, 4), x[:1], x]

    traced = trace(function, inputs)
    assert traced.views == (1, -1, -1, -1, 0)
    mx.eval(inputs)
    mx.eval(results := function(*inputs))
    for result, place in zip(results, traced.views, strict=True):
        shared = [np.shares_memory(np.asarray(result), np.asarray(x)) for x in inputs]
        assert place < 0 or shared[place]
    assert trace(lambda x: [x + 1], inputs[:1]).views == ()
    assert trace(lambda: [mx.zeros((2, 3)).reshape(6)], []).views == ()  # of no input at all


def test_a_norms_gradient_takes_a_temporary_array_on_a_gpu() -> None:
    """Which a CPU's trace does not have: there the norm is several operations."""
    norm = {
        "name": "RMSNormVJP",
        "inputs": [(name, (2000, 64), mx.float32) for name in "xwd"],
        "outputs": [("dx", (2000, 64), mx.float32), ("dw", (64,), mx.float32)],
    }
    assert allocated_bytes([norm], ["dx", "dw"]) == 512 * 64 * 4
    assert workspace_bytes([norm], ["dx", "dw"]) == 512 * 64 * 4
