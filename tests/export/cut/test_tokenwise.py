"""Elementwise graphs run a tile of tokens at a time, with the results of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from oracles import whole_model as reference
from support.cuts import elementwise_of
from support.lengths import pairs
from support.models import (
    FAMILIES,
    LENGTHS,
    adapters_of,
    check_gradients,
    each_family,
    model_of,
    rows_of,
)
from support.plans import demand_of

from export.cut.properties import treats_tokens_alike
from runtime.bundle.checks import check_manifest
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError
from runtime.operations.attention import Attention
from runtime.operations.elementwise import Elementwise
from runtime.operations.elementwise_kernel import ElementwiseKernel
from runtime.operations.values import Shape, T, graph_key, shape_at
from runtime.plan.block_peaks import PeakModel
from runtime.plan.lower import Sizes, lower

Tiny = Callable[..., Bundle]
Rng = np.random.Generator


@pytest.mark.parametrize(("family", "length"), pairs(FAMILIES, LENGTHS))
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, length: int
) -> None:
    bundle = tiny(family, seq_lens=LENGTHS)
    adapters = adapters_of(bundle, rng)
    rows = rows_of(bundle, rng)
    model = model_of(bundle, length)
    check_gradients(reference.dense_model(bundle, adapters), model, adapters, rows, tmp_path)


@each_family
def test_norms_activations_and_rotations_are_tiled(tiny: Tiny, family: str) -> None:
    manifest = tiny(family, seq_lens=LENGTHS).manifest
    block_type = manifest.block_types["layer0"]
    graphs = elementwise_of(block_type)
    tiled = [one for one in graphs if one.tokenwise]
    attention = next(one for one in block_type.operations if isinstance(one, Attention))
    made = [("self_attn.q_proj.in",), attention.inputs, ("mlp.gate_proj.in",)]
    made.append(("mlp.down_proj.in",))
    gemma = [("out",)] if family == "gemma3" else []  # elsewhere a sum, which holds nothing inside
    assert [one.outputs for one in tiled] == made + gemma
    for one in tiled:
        assert {one.graph_tokens(bucket) for bucket in LENGTHS} == {48, 64}
        assert graph_key(one.graph, "vjp", 128) not in manifest.graphs
    assert [one.outputs for one in tiled if one.placed] == [attention.inputs]


def place(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).__array_interface__["data"][0])


@each_family
def test_gradients_that_are_one_array_are_one(tiny: Tiny, rng: Rng, family: str) -> None:
    """Of the graphs as they were written, whole and by tiles, whichever gradients are wanted."""
    bundle = tiny(family, seq_lens=LENGTHS)
    kernel = model_of(bundle, 128).executor.kernels[Elementwise]
    assert isinstance(kernel, ElementwiseKernel)
    shared = 0
    for block_type in bundle.manifest.block_types.values():
        program = block_type.program("gpu")
        for operation in (one for one in elementwise_of(block_type) if any(one.vjp_same)):
            shapes = {
                name: program.values[name.removeprefix("~")]
                for name in operation.vjp_inputs
                if name[0] != "@"
            }
            shapes.update({f"@{name}": shape for name, shape in block_type.parameters.items()})
            given = {
                name: mx.array(rng.standard_normal(shape_at(shapes[name], 128)).astype(np.float32))
                for name in operation.vjp_inputs
            }
            arguments = list(given.values())
            made = operation.vjp_outputs
            everything = kernel.results(operation, program, "vjp", arguments, made, 128)
            mx.eval(everything)
            for name, same in zip(made, operation.vjp_same, strict=True):
                found = kernel.results(operation, program, "vjp", arguments, [name], 128)
                assert list(found) == [name] and mx.array_equal(found[name], everything[name])
                if same:
                    other = given[same] if same.startswith("~") else everything[same]
                    assert place(everything[name]) == place(other)
                    shared += 1
    assert shared


@pytest.mark.parametrize("placed", [False, True])
def test_tiling_makes_the_peak_smaller(tiny: Tiny, placed: bool) -> None:
    manifest = tiny("gemma3", seq_lens=LENGTHS).manifest
    lowered = lower(manifest, 128, Sizes(1 << 12, 16), packed=False)
    model = PeakModel(manifest, lowered, demand_of("mebp"))
    graphs = elementwise_of(manifest.block_types["layer0"])
    operation = next(one for one in graphs if one.tokenwise and one.placed == placed)
    tile = manifest.graphs[graph_key(operation.graph, "vjp", 64)]
    widest = max(int(np.prod(shape)) * 4 for shape in tile.outputs)
    assert tile.workspace_bytes > widest  # what is saved, at twice the tokens, is as large again
    assert model.block(1, 1).backward_bytes > tile.workspace_bytes


@pytest.mark.parametrize(
    ("length", "tile"), [(1, 1), (64, 64), (65, 65), (97, 97), (100, 50), (4096, 64), (34, 34)]
)
def test_tiles_divide_the_bucket(length: int, tile: int) -> None:
    operation = Elementwise(("x",), ("y",), "g", tokenwise=True)
    assert operation.graph_tokens(length) == tile
    assert replace(operation, tokenwise=False).graph_tokens(length) == length


def test_what_mixes_tokens_is_not_alike() -> None:
    shapes: dict[str, Shape] = {"x": (1, T, 4), "@w": (4,), "y": (1, T, 4), "z": (1, 4, T)}

    def scaled(x: mx.array, w: mx.array) -> list[mx.array]:
        return [x * w]

    def turned(x: mx.array, w: mx.array) -> list[mx.array]:
        return [(x * w).swapaxes(1, 2)]

    def summed(x: mx.array, w: mx.array) -> list[mx.array]:
        return [mx.cumsum(x, axis=1) * w]

    def placed(x: mx.array, w: mx.array) -> list[mx.array]:
        return [x * w + mx.arange(x.shape[1])[None, :, None]]

    assert treats_tokens_alike(scaled, ("x", "@w"), ("y",), shapes)
    assert treats_tokens_alike(turned, ("x", "@w"), ("z",), shapes)
    assert not treats_tokens_alike(summed, ("x", "@w"), ("y",), shapes)
    assert not treats_tokens_alike(placed, ("x", "@w"), ("y",), shapes)


def test_a_lie_about_tokens_is_refused(tiny: Tiny) -> None:
    """Graphs of a tile must be there, and every value must have one axis of tokens."""
    manifest = tiny("gemma3", seq_lens=LENGTHS).manifest
    block_type = manifest.block_types["layer0"]
    operations = tuple(
        replace(one, tokenwise=not one.tokenwise) if isinstance(one, Elementwise) else one
        for one in block_type.operations
    )
    lie = replace(block_type, operations=operations)
    changed = replace(manifest, block_types={**manifest.block_types, "layer0": lie})
    with pytest.raises(BundleError, match="graph"):
        check_manifest(changed)
