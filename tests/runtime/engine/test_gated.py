"""Gated activations: found by the export, and computed by a kernel as their graphs would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.models import FAMILIES

from export.cut.properties import ACTIVATIONS, gated_activation
from harness.oracles.reference import relative_error
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import Step
from ondevice.bundle.store import Bundle
from ondevice.errors import BundleError
from ondevice.operations.elementwise import Activation, graph_key
from ondevice.operations.program import BlockType
from ondevice.operations.values import F32, Sizes, Work, Workspace
from runtime.engine.graphs import GraphRunner
from runtime.engine.kernels.gated import gated, gated_vjp
from runtime.lowering.schedule import Op
from runtime.lowering.token_tiles import GATED_CHUNK, GATED_SCRATCH_BYTES
from runtime.planner.peak import Liveness

Tiny = Callable[..., Bundle]
Rng = np.random.Generator
CLOSE = 1e-6


def normal(rng: Rng, *shape: int) -> mx.array:
    return mx.array(3 * rng.standard_normal(shape).astype(np.float32))


def exact(name: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f and f' in float64, as they are usually written."""
    if name == "silu":
        s = 1 / (1 + np.exp(-g))
        return g * s, s * (1 + g * (1 - s))
    root = np.sqrt(2 / np.pi)
    t = np.tanh(root * (g + 0.044715 * g**3))
    slope = root * (1 + 3 * 0.044715 * g**2)
    return g * (1 + t) / 2, (1 + t) / 2 + g * (1 - t * t) * slope / 2


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_the_kernel_computes_the_activation(rng: Rng, name: str, chunks: int) -> None:
    shape = (1, int(rng.integers(1, 9)), chunks * GATED_CHUNK // 8 + int(rng.integers(1, 99)))
    g, u, dy = (normal(rng, *shape) for _ in range(3))
    wide = [np.array(x).astype(np.float64) for x in (g, u, dy)]
    f, slope = exact(name, wide[0])
    found = (gated(name, g, u), *gated_vjp(name, g, u, dy))
    expected = (f * wide[1], wide[2] * wide[1] * slope, wide[2] * f)
    for one, values in zip(found, expected, strict=True):
        assert relative_error(one, mx.array(values.astype(np.float32))) <= CLOSE
    for x, before in zip((g, u, dy), wide, strict=True):
        assert (np.array(x) == before).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_value_does_not_depend_on_its_neighbours(rng: Rng, name: str) -> None:
    """Else a tile of tokens, or a lane, would not be what the whole is, bit for bit."""
    g, u, dy = (normal(rng, 1, 7, GATED_CHUNK // 5) for _ in range(3))
    whole = [gated(name, g, u), *gated_vjp(name, g, u, dy)]
    first, last = sorted(rng.choice(8, 2, replace=False).tolist())
    part = [mx.contiguous(x[:, first:last]) for x in (g, u, dy)]
    tile = [gated(name, *part[:2]), *gated_vjp(name, *part)]
    for one, all_ in zip(tile, whole, strict=True):
        assert mx.array_equal(one, all_[:, first:last])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_values_are_flat_and_no_number_stays_none(name: str) -> None:
    g = mx.array([-1e4, -200.0, 0.0, 200.0, 1e4, float("nan")])
    one = mx.ones(g.shape)
    y, (d_gate, d_up) = gated(name, g, one), gated_vjp(name, g, one, one)
    expected = [0, 0, 0, 200, 1e4]
    assert np.array(y)[:-1].tolist() == expected == np.array(d_up)[:-1].tolist()
    assert np.array(d_gate)[:-1].tolist() == [0, 0, 0.5, 1, 1]
    assert all(np.isnan(np.array(x)[-1]) for x in (y, d_gate, d_up))


def steps_of(bundle: Bundle) -> list[tuple[BlockType, Step]]:
    kinds = bundle.manifest.block_types.values()
    return [(kind, step) for kind in kinds for step in kind.steps if step.gated]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_and_graph_agree(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family)
    found = steps_of(bundle)
    layers = [name for name in bundle.manifest.block_types if name.startswith("layer")]
    assert [kind.name for kind, _ in found] == layers
    for kind, step in found:
        assert step.gated == ("gelu_tanh" if family == "gemma3" else "silu")
        width = kind.values[step.outputs[0]][-1]
        graphs, arguments = (
            GraphRunner(bundle, 32),
            [normal(rng, 1, 32, int(width)) for _ in range(3)],
        )
        for direction, names in (("forward", step.outputs), ("vjp", step.vjp_outputs)):
            given = arguments[: len(step.inputs)] if direction == "forward" else arguments
            by_kernel, by_graph = (
                graphs.run(kind, one, direction, given, names, 32)
                for one in (step, replace(step, gated=""))
            )
            assert list(by_kernel) == list(by_graph) == list(names)
            for name in names:
                assert relative_error(by_kernel[name], by_graph[name]) <= CLOSE


def test_the_plan_counts_a_kernel_on_a_cpu_and_graphs_on_a_gpu(tiny: Tiny) -> None:
    """And a gradient that nobody wants, which is made all the same."""
    manifest = tiny("qwen2").manifest
    block = manifest.layers[0]
    kind = manifest.block_types[block.type]
    index, step = next((i, s) for i, s in enumerate(kind.steps) if s.gated)
    graph = manifest.graphs[graph_key(step.graph, "vjp", 32)]
    value = 64 * int(kind.values[step.outputs[0]][-1]) * F32  # two tiles of 32 tokens
    both, one = (Op(True, index, step.vjp_outputs[:count], ()) for count in (2, 1))

    def held(device: str, op: Op) -> int:
        there = replace(manifest, device=device)
        return Workspace(there, Work(32), Sizes(4096, 16, 0)).of(block, kind, op, 1, 64)

    assert held("cpu", both) == GATED_SCRATCH_BYTES
    assert held("cpu", one) == GATED_SCRATCH_BYTES + value
    assert held("gpu", both) == graph.workspace_bytes + value  # results of a tile, twice half
    files = [
        Liveness(replace(manifest, device=device), Work(32), Sizes(4096, 16, 0)).graph_file_bytes()
        for device in ("gpu", "cpu")
    ]
    keys = {graph_key(step.graph, direction, 32) for direction in ("forward", "vjp")}
    assert files[0] - files[1] == sum(manifest.graphs[key].nbytes for key in keys)


def asked(function: Callable[[mx.array, mx.array], mx.array]) -> Activation:
    def forward(g: mx.array, u: mx.array) -> list[mx.array]:
        return [function(g, u)]

    def vjp(g: mx.array, u: mx.array, dy: mx.array) -> list[mx.array]:
        return mx.vjp(forward, [g, u], [dy])[1]

    return gated_activation(forward, vjp, (1, 4, 32))


def test_only_what_is_the_activation_is_taken_for_it() -> None:
    assert asked(lambda g, u: g / (1 + mx.exp(-g)) * u) == "silu"
    assert asked(lambda g, u: u * nn.gelu_approx(g)) == "gelu_tanh"
    assert asked(lambda g, u: nn.gelu(g) * u) == ""
    assert asked(lambda g, u: nn.gelu_fast_approx(g) * u) == ""
    assert asked(lambda g, u: nn.silu(u) * g) == ""
    assert asked(lambda g, u: nn.silu(g) + u) == ""
    assert asked(lambda g, u: nn.relu(g) * u) == ""
    assert asked(lambda g, u: nn.silu(mx.clip(g, -20, 20)) * u) == ""
    assert asked(lambda g, u: nn.silu(mx.stop_gradient(g)) * u) == ""


LIES: list[dict[str, object]] = [
    {"tokenwise": False},
    {"inputs": ("mlp.up_proj.out", "mlp.gate_proj.out")},
    {"vjp_inputs": ("mlp.up_proj.out", "mlp.gate_proj.out", "~mlp.down_proj.in")},
    {"vjp_outputs": ("mlp.up_proj.out", "mlp.gate_proj.out")},
    {"vjp_same": ("~mlp.down_proj.in", "")},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_gated_step_that_cannot_be_one_is_refused(tiny: Tiny, lie: dict[str, object]) -> None:
    manifest = tiny("qwen2").manifest
    kind = manifest.block_types["layer0"]
    steps = tuple(replace(s, **lie) if s.gated else s for s in kind.steps)  # type: ignore[arg-type]
    changed = replace(
        manifest, block_types={**manifest.block_types, "layer0": replace(kind, steps=steps)}
    )
    with pytest.raises(BundleError):
        check_manifest(changed)


def test_a_norm_is_not_gated(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest
    kind = manifest.block_types["layer0"]
    steps = tuple(replace(s, gated="silu") if s.op == "elementwise" else s for s in kind.steps)
    changed = replace(
        manifest, block_types={**manifest.block_types, "layer0": replace(kind, steps=steps)}
    )
    with pytest.raises(BundleError, match="silu"):
        check_manifest(changed)
