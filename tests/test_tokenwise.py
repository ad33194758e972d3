"""Elementwise graphs run a tile of tokens at a time, with the results of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import FAMILIES, program_of
from runtime.planner.workspace import Sizes, Work
from test_programs import CLOSE, adapters_of, agree, mebp, rows_of

from export.cut.properties import treats_tokens_alike
from harness.oracles import reference
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import Step, graph_length
from ondevice.bundle.store import Bundle
from ondevice.errors import BundleError
from ondevice.operations.elementwise import graph_key
from ondevice.operations.values import Shape, T, shape_at
from runtime.engine.graphs import GraphRunner
from runtime.planner.peak import Liveness

Tiny = Callable[..., Bundle]
Rng = np.random.Generator
LENGTHS = (96, 128)  # two tiles of 48, two of 64


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, length: int
) -> None:
    bundle = tiny(family, seq_lens=LENGTHS)
    adapters = adapters_of(bundle, rng)
    rows = rows_of(bundle, rng)
    program = program_of(bundle, length)
    loss, found = mebp(program, adapters, rows, tmp_path)
    model = reference.dense_model(bundle, adapters)
    expected_loss, expected = reference.gradients(model, [(r.tokens, r.first) for r in rows])
    assert loss.loss_sum / loss.tokens == pytest.approx(expected_loss, rel=CLOSE)
    agree(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_activations_are_tiled_and_positions_are_not(tiny: Tiny, family: str) -> None:
    manifest = tiny(family, seq_lens=LENGTHS).manifest
    kind = manifest.block_types["layer0"]
    tiled = [step for step in kind.steps if step.tokenwise]
    made = [("self_attn.q_proj.in",), ("mlp.gate_proj.in",), ("mlp.down_proj.in",)]
    gemma = [("out",)] if family == "gemma3" else []  # elsewhere a sum, which holds nothing inside
    assert [step.outputs for step in tiled] == made + gemma
    for step in tiled:
        assert {graph_length(step, bucket) for bucket in LENGTHS} == {48, 64}
        assert graph_key(step.graph, "vjp", 128) not in manifest.graphs
    attention = next(step for step in kind.steps if step.op == "attention")
    maker = next(
        s for s in kind.steps if s.op == "elementwise" and attention.inputs[0] in s.outputs
    )
    assert not maker.tokenwise and graph_length(maker, 128) == 128


def place(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).__array_interface__["data"][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_are_one_array_are_one(tiny: Tiny, rng: Rng, family: str) -> None:
    """Of the graphs as they were written, whole and by tiles, whichever gradients are wanted."""
    bundle = tiny(family, seq_lens=LENGTHS)
    shared = 0
    for kind in bundle.manifest.block_types.values():
        for step in (step for step in kind.steps if any(step.vjp_same)):
            shapes = {
                name: kind.values[name.removeprefix("~")]
                for name in step.vjp_inputs
                if name[0] != "@"
            }
            shapes.update({f"@{name}": shape for name, shape in kind.parameters.items()})
            given = {
                name: mx.array(rng.standard_normal(shape_at(shapes[name], 128)).astype(np.float32))
                for name in step.vjp_inputs
            }
            arguments = list(given.values())
            graphs = GraphRunner(bundle, 128)
            everything = graphs.run(kind, step, "vjp", arguments, step.vjp_outputs, 128)
            mx.eval(everything)
            for name, same in zip(step.vjp_outputs, step.vjp_same, strict=True):
                (alone,) = graphs.run(kind, step, "vjp", arguments, [name], 128).values()
                assert mx.array_equal(alone, everything[name])
                if same:
                    other = given[same] if same.startswith("~") else everything[same]
                    assert place(everything[name]) == place(other)
                    shared += 1
    assert shared


def test_tiling_makes_the_peak_smaller(tiny: Tiny) -> None:
    manifest = tiny("gemma3", seq_lens=LENGTHS).manifest
    model = Liveness(manifest, Work(128), Sizes(1 << 12, 16, 0))
    step = next(s for s in manifest.block_types["layer0"].steps if s.tokenwise)
    tile = manifest.graphs[graph_key(step.graph, "vjp", 64)]
    widest = max(int(np.prod(shape)) * 4 for shape in tile.outputs)
    assert tile.workspace_bytes > widest  # what is saved, at twice the tokens, is as large again
    assert model.block(1, 1).backward_bytes > tile.workspace_bytes


@pytest.mark.parametrize(
    ("length", "tile"), [(1, 1), (64, 64), (65, 65), (97, 97), (100, 50), (4096, 64), (34, 34)]
)
def test_tiles_divide_the_rung(length: int, tile: int) -> None:
    step = Step("elementwise", tokenwise=True)
    assert graph_length(step, length) == tile
    assert graph_length(replace(step, tokenwise=False), length) == length


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
    kind = manifest.block_types["layer0"]
    steps = tuple(
        replace(step, tokenwise=not step.tokenwise) if step.op == "elementwise" else step
        for step in kind.steps
    )
    lie = replace(
        manifest, block_types={**manifest.block_types, "layer0": replace(kind, steps=steps)}
    )
    with pytest.raises(BundleError, match="graph"):
        check_manifest(lie)
