"""Gated activations: found by the export, and computed by a kernel as their graphs would."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu_oai
from msgspec.structs import replace
from oracles.whole_model import relative_error
from support.bundles import Rng, Tiny
from support.models import each_family, model_of

from export.cut.properties import ACTIVATIONS, gated_activation
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.operations.base import Call, Operation
from runtime.operations.elementwise import Activation, Elementwise
from runtime.operations.gated import CHUNK_VALUES, SCRATCH_BYTES, Gated
from runtime.operations.gated_kernel import CURVES, Curve, gated, gated_by, gated_vjp, gated_vjp_by
from runtime.operations.kernel import Run
from runtime.operations.program import BlockType, Instruction
from runtime.operations.values import F32, graph_key
from runtime.plan.block_peaks import PeakModel
from runtime.plan.demand import Demand
from runtime.plan.lower import LoweredModel, Sizes, lower

CLOSE = 1e-6
XIELU = (0.3, -0.2, 0.5, -1e-6)  # its parameters: alpha_p, alpha_n, beta, eps
# a slope takes about thirty float32 operations of half a unit each; 1 - tanh² cancels where its
# factor is 5
ROUNDED = 48 * 2.0**-24


def curve(name: str) -> Curve:
    return partial(CURVES[name], *(XIELU if name == "xielu" else ()))


def normal(rng: Rng, *shape: int) -> mx.array:
    return mx.array(3 * rng.standard_normal(shape).astype(np.float32))


def exact(name: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f and f' in float64, as they are usually written."""
    if name == "silu":
        s = 1 / (1 + np.exp(-g))
        return g * s, s * (1 + g * (1 - s))
    if name == "gelu":
        p = (1 + np.vectorize(math.erf)(g / np.sqrt(2))) / 2
        return g * p, p + g * np.exp(-(g**2) / 2) / np.sqrt(2 * np.pi)
    if name == "xielu":
        p, n = (np.log1p(np.exp(alpha)) for alpha in XIELU[:2])
        *_, beta, eps = XIELU
        below, n = np.minimum(g, eps), n + beta
        slope = np.where(g > 0, 2 * p * g, (np.exp(below) * (g < eps) - 1) * n)
        return np.where(g > 0, p * g**2, (np.expm1(below) - g) * n) + beta * g, slope + beta
    if name.startswith("relu"):
        f = np.maximum(g, 0)
        return (f, np.sign(f)) if name == "relu" else (f**2, 2 * f)
    root = np.sqrt(2 / np.pi)
    t = np.tanh(root * (g + 0.044715 * g**3))
    slope = root * (1 + 3 * 0.044715 * g**2)
    return g * (1 + t) / 2, (1 + t) / 2 + g * (1 - t * t) * slope / 2


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_the_kernel_computes_the_activation(rng: Rng, name: str, chunks: int) -> None:
    shape = (1, int(rng.integers(1, 9)), chunks * CHUNK_VALUES // 8 + int(rng.integers(1, 99)))
    g, u, dy = (normal(rng, *shape) for _ in range(3))
    wide = [np.array(x).astype(np.float64) for x in (g, u, dy)]
    f, slope = exact(name, wide[0])
    found = (gated(curve(name), g, u), *gated_vjp(curve(name), g, u, dy))
    expected = (f * wide[1], wide[2] * wide[1] * slope, wide[2] * f)
    # 1 + tanh cancels where g is below 0, so that the error follows the operands, not the result
    operands = (wide[0] * wide[1], wide[2] * wide[1], wide[2] * wide[0])
    if name in ("relu2", "xielu"):  # which grow by squares
        operands = tuple(map(np.maximum, map(np.abs, operands), map(np.abs, expected)))
    for computed, values, scale in zip(found, expected, operands, strict=True):
        assert np.abs(np.array(computed) - values).max() <= ROUNDED * np.abs(scale).max()
    assert mx.array_equal(
        gated(curve(name), g), gated(curve(name), g, mx.ones(shape))
    )  # without a gate
    (alone,) = gated_vjp(curve(name), g, dy)
    error = np.abs(np.array(alone) - wide[2] * slope).max()
    assert error <= ROUNDED * max(np.abs(wide[2]).max(), np.abs(wide[2] * slope).max())
    for x, before in zip((g, u, dy), wide, strict=True):
        assert (np.array(x) == before).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_value_does_not_depend_on_its_neighbours(rng: Rng, name: str) -> None:
    """Else a tile of tokens, or a lane, would not be what the whole is, bit for bit."""
    g, u, dy = (normal(rng, 1, 7, CHUNK_VALUES // 5) for _ in range(3))
    whole = [gated(curve(name), g, u), *gated_vjp(curve(name), g, u, dy)]
    first, last = sorted(rng.choice(8, 2, replace=False).tolist())
    part = [mx.contiguous(x[:, first:last]) for x in (g, u, dy)]
    tile = [gated(curve(name), *part[:2]), *gated_vjp(curve(name), *part)]
    for one, all_ in zip(tile, whole, strict=True):
        assert mx.array_equal(one, all_[:, first:last])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_values_are_flat_and_no_number_stays_none(name: str) -> None:
    g = mx.array([-1e4, -200.0, 0.0, 200.0, 1e4, float("nan")])
    one = mx.ones(g.shape)
    y, (d_gate, d_up) = gated(curve(name), g, one), gated_vjp(curve(name), g, one, one)
    with np.errstate(over="ignore"):
        f, slope = exact(name, np.array(g)[:-1].astype(np.float64))
    assert np.array_equal(y, d_up, equal_nan=True)
    assert np.allclose(np.array(y)[:-1], f, rtol=CLOSE, atol=1e-40)
    assert np.allclose(np.array(d_gate)[:-1], slope, rtol=CLOSE, atol=1e-40)
    assert all(np.isnan(np.array(x)[-1]) for x in (y, d_gate, d_up))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_clamped_activation_is_mlx_lms(rng: Rng, device: str) -> None:
    """Lazy, as on a GPU, and by NumPy; far beyond both limits."""
    g, u, dy = (10 * normal(rng, 5, 40) for _ in range(3))
    (expected,), slopes = mx.vjp(swiglu_oai, [g, u], [dy])
    found = gated_by(device, "clamped", g, u), *gated_vjp_by(device, "clamped", g, u, dy)
    for mine, theirs in zip(found, (expected, *slopes), strict=True):
        assert mx.allclose(mine, theirs, rtol=1e-5, atol=1e-4)


def gated_of(bundle: Bundle) -> list[tuple[BlockType, Elementwise]]:
    return [
        (block_type, operation)
        for block_type in bundle.manifest.block_types.values()
        for operation in block_type.operations
        if isinstance(operation, Elementwise) and operation.gated
    ]


@each_family
def test_kernel_and_graph_agree(tiny: Tiny, rng: Rng, family: str) -> None:
    """Forward, and backward whichever of the two gradients are wanted."""
    bundle = tiny(family)
    found = gated_of(bundle)
    layers = [name for name in bundle.manifest.block_types if name.startswith("layer")]
    assert [block_type.name for block_type, _ in found] == layers
    model = model_of(bundle, 32)
    for block_type, operation in found:
        assert operation.gated == ("gelu_tanh" if family == "gemma3" else "silu")
        block = next(b for b in bundle.manifest.layers if b.type == block_type.name)
        width = int(block_type.values[operation.outputs[0]][-1])
        names = (*operation.inputs, f"~{operation.outputs[0]}")
        given = {name: normal(rng, 1, 32, width) for name in names}

        def by_kernel(
            one: Operation,
            backward: bool,
            wanted: tuple[str, ...],
            block_type: BlockType = block_type,
            block: Any = block,
            given: dict[str, mx.array] = given,
        ) -> dict[str, mx.array]:
            program = block_type.program("cpu")
            instruction = Instruction(backward, one, wanted, (), ())
            run = Run(block, program, instruction, 32)
            kernel, values = model.executor.kernels[type(one)], dict(given)
            if backward:
                return kernel.backward(run, values, {}, {})
            kernel.forward(run, [values], [{}])
            return {name: values[name] for name in wanted}

        on_cpu = operation.on_device("cpu")
        assert type(on_cpu) is Gated and operation.on_device("gpu") is operation
        gate, up = operation.inputs
        cases = [(False, operation.outputs)] + [(True, w) for w in ((gate, up), (gate,), (up,))]
        for backward, wanted in cases:
            found_by = [by_kernel(one, backward, wanted) for one in (on_cpu, operation)]
            assert set(found_by[0]) == set(found_by[1]) == set(wanted)
            for name in wanted:
                assert relative_error(found_by[0][name], found_by[1][name]) <= CLOSE


def lowered(manifest: Manifest, device: str) -> LoweredModel:
    return lower(replace(manifest, device=device), 32, Sizes(4096, 16, 0), packed=False)


def test_the_plan_counts_a_kernel_on_a_cpu_and_graphs_on_a_gpu(tiny: Tiny) -> None:
    """And a gradient that nobody wants, which is made all the same."""
    manifest = tiny("qwen2").manifest
    block = manifest.layers[0]
    block_type = manifest.block_types[block.type]
    at, operation = next(
        (index, one)
        for index, one in enumerate(block_type.operations)
        if isinstance(one, Elementwise) and one.gated
    )
    graph = manifest.graphs[graph_key(operation.graph, "vjp", 32)]
    value = 64 * int(block_type.values[operation.outputs[0]][-1]) * F32  # two tiles of 32 tokens

    def held(device: str, wanted: int) -> int:
        there = lowered(manifest, device)
        program = there.layers[0].program
        names = operation.vjp_outputs[:wanted]
        call = Call(True, names, 1, 64, program.values, block.tensor)
        return program.operations[at].working_bytes(call, there.execution)

    assert held("cpu", 2) == SCRATCH_BYTES
    assert held("cpu", 1) == SCRATCH_BYTES + value
    assert held("gpu", 2) == graph.workspace_bytes + value  # results of a tile, twice half
    gpu, cpu = (
        PeakModel(manifest, lowered(manifest, device), Demand(backward=True))
        for device in ("gpu", "cpu")
    )
    keys = {graph_key(operation.graph, direction, 32) for direction in ("forward", "vjp")}
    expected = sum(manifest.graphs[key].nbytes for key in keys)
    assert gpu.graph_file_bytes() - cpu.graph_file_bytes() == expected


def asked(function: Callable[..., mx.array], *widths: int) -> Activation:
    """What a function of arrays of these widths is taken for, which returns one of 32."""

    def forward(*given: mx.array) -> list[mx.array]:
        return [function(*given)]

    def vjp(*given: mx.array) -> list[mx.array]:
        return mx.vjp(forward, given[:-1], given[-1:])[1]

    return gated_activation(forward, vjp, *((1, 4, width) for width in (*widths, 32)))


def test_only_what_is_the_activation_is_taken_for_it() -> None:
    two = (32, 32)
    assert asked(lambda g, u: g / (1 + mx.exp(-g)) * u, *two) == "silu"
    assert asked(lambda g, u: u * nn.gelu_approx(g), *two) == "gelu_tanh"
    assert asked(lambda g, u: nn.gelu(g) * u, *two) == "gelu"
    assert asked(lambda g, u: nn.gelu_fast_approx(g) * u, *two) == ""
    assert asked(lambda g, u: nn.silu(u) * g, *two) == ""
    assert asked(lambda g, u: nn.silu(g) + u, *two) == ""
    assert asked(lambda g, u: mx.maximum(g, 0) * u, *two) == "relu"
    assert asked(lambda g, u: nn.silu(mx.clip(g, -20, 20)) * u, *two) == ""
    assert asked(lambda g, u: nn.silu(mx.stop_gradient(g)) * u, *two) == ""
    assert asked(lambda gu: nn.silu(gu[..., :32]) * gu[..., 32:], 64) == "silu"
    assert asked(lambda gu: nn.silu(gu[..., 32:]) * gu[..., :32], 64) == ""
    assert asked(lambda gu: nn.silu(gu[..., ::2]) * gu[..., 1::2], 64) == ""
    assert asked(lambda g: mx.square(mx.maximum(g, 0)), 32) == "relu2"
    assert asked(lambda g: nn.gelu(g), 32) == "gelu"
    assert asked(lambda g: nn.leaky_relu(g), 32) == ""
