"""An MLP that takes a tile of tokens at a time: folding, its results, and what is alive in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from runtime.planner.workspace import Sizes, Work
from support.models import FAMILIES, LENGTHS, adapters_of, agree, mebp, model_of, rows_of

from harness.oracles import reference
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import Linear, Step
from ondevice.bundle.store import Bundle
from ondevice.errors import BundleError
from ondevice.operations.base import WHOLE, fold, rows_at_once, token_tile, unfold
from ondevice.operations.program import BlockType
from runtime.engine.executor import accumulate
from runtime.planner.peak import Liveness

Tiny = Callable[..., Bundle]
Rng = np.random.Generator


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_layer_its_mlp_is_folded(tiny: Tiny, family: str) -> None:
    kind = tiny(family, seq_lens=LENGTHS).manifest.block_types["layer0"]
    folded = fold(kind)
    (tiled,) = [step for step in folded.steps if step.op == "tiled"]
    assert (tiled.inputs, tiled.outputs) == (("mlp.gate_proj.in",), ("mlp.down_proj.out",))
    assert [step.op for step in tiled.steps] == ["linear", "elementwise", "linear"]
    assert len(folded.steps) == len(kind.steps) - 2
    inner = unfold(folded, tiled)
    assert inner.steps == tiled.steps and fold(folded) == folded
    assert inner.name != folded.name


def kind_of(*steps: Step, output: str = "y") -> BlockType:
    return BlockType("k", "x", output, {}, {}, steps)


def linear(source: str, *results: str) -> Step:
    return Step("linear", (source,), linears=tuple(Linear(f"m.{r}", r, False) for r in results))


def glue(*names: str, tokenwise: bool = True) -> Step:
    return Step("elementwise", names[:-1], names[-1:], graph="g", tokenwise=tokenwise)


def test_only_closed_stretches_of_token_wise_steps_are_folded() -> None:
    mlp = (linear("x", "a", "b"), glue("a", "b", "c"), linear("c", "y"))
    assert [step.op for step in fold(kind_of(*mlp)).steps] == ["tiled"]
    mixing = (mlp[0], glue("a", "b", "c", tokenwise=False), mlp[2])
    two_ends = (mlp[0], mlp[1], linear("c", "y", "z"))
    for steps in (mixing, two_ends, mlp[:2]):
        assert fold(kind_of(*steps)) == kind_of(*steps)
    read_later = kind_of(*mlp, glue("y", "a", "w", tokenwise=False), output="w")
    reads_more = kind_of(mlp[0], glue("a", "b", "x", "c"), mlp[2])
    assert fold(read_later) == read_later
    assert [step.op for step in fold(reads_more).steps] == ["tiled"]  # x is what it begins with
    from_elsewhere = kind_of(linear("x", "r"), glue("r", "s", tokenwise=False), linear("s", "a"),
                             glue("a", "r", "c"), linear("c", "y"))  # fmt: skip
    assert fold(from_elsewhere) == from_elsewhere


@pytest.mark.parametrize(
    ("bucket", "most", "tile"),
    [(128, WHOLE, 128), (128, 127, 64), (128, 1, 64), (96, 95, 48), (4096, 1000, 512),
     (192, 128, 64), (384, 200, 192), (64, 16, 64), (65, 16, 65)],
)  # fmt: skip
def test_tiles_are_multiples_of_the_graphs_and_divide_the_rung(
    bucket: int, most: int, tile: int
) -> None:
    kind = fold(kind_of(linear("x", "a"), glue("a", "c"), linear("c", "y")))
    assert token_tile(kind, bucket, most) == tile
    assert token_tile(replace(kind, steps=()), bucket, most) == bucket


def test_a_bundle_cannot_bring_a_folded_step(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest
    kinds = {name: fold(kind) for name, kind in manifest.block_types.items()}
    with pytest.raises(BundleError, match="tiled step"):
        check_manifest(replace(manifest, block_types=kinds))


@pytest.mark.parametrize("arithmetic", ["packed", "unpacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, arithmetic: str
) -> None:
    """Also where some layers keep what they would recompute: what is tiled is recomputed."""
    bundle = tiny(family, seq_lens=LENGTHS)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = reference.dense_model(bundle, adapters)
    expected_loss, expected = reference.gradients(model, [(r.tokens, r.first) for r in rows])
    for kept in (0, 1):
        for length in LENGTHS:
            program = model_of(bundle, length, arithmetic, most_tokens=1)
            loss, found = mebp(program, adapters, rows, tmp_path, kept)
            assert loss.loss_sum / loss.tokens == pytest.approx(expected_loss, rel=1e-5)
            agree(found, expected)


def test_one_adapter_alone_is_trained(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    """The lowest layer with nothing to train below its MLP, or only above it."""
    for target in ("down_proj", "o_proj", "up_proj"):
        bundle = tiny("gemma3", seq_lens=LENGTHS, lora_targets=target)
        adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
        program = model_of(bundle, 128, most_tokens=64)
        _, found = mebp(program, adapters, rows, tmp_path)
        model = reference.dense_model(bundle, adapters)
        agree(found, reference.gradients(model, [(r.tokens, r.first) for r in rows])[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_companions_change_no_bit(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family, seq_lens=LENGTHS)
    program = model_of(bundle, 128, most_tokens=64)
    block = program.blocks[1]
    loras = [adapters_of(bundle, rng).loras(block) for _ in range(3)]
    shape = (1, 128, bundle.manifest.hidden_size)
    xs = [mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in loras]
    alone = [program.forward(block, x, lora) for x, lora in zip(xs, loras, strict=True)]
    together = program.forward_lanes(block, list(xs), loras)
    assert all(mx.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_what_is_alive_falls_with_the_tile(tiny: Tiny, method: str) -> None:
    manifest = tiny("llama", seq_lens=(1024,)).manifest
    found = []
    for most in (WHOLE, 512, 64):
        live = Liveness(manifest, Work(1024, method=method), Sizes(1 << 12, 16, 0, False, most))
        block = live.block(2, 2)
        found.append(max(block.forward_bytes, block.backward_bytes))
        assert live.token_tile == min(most, 1024)
    assert found == sorted(found, reverse=True) and found[1] < 0.9 * found[0]


def test_gradients_add_up_in_their_place(rng: Rng) -> None:
    """What is there before the tiles stays where it is: else it would lie in the tiles' holes."""
    parts = [rng.standard_normal((2, 3, 4)).astype(np.float32) for _ in range(3)]
    total = {"q": (mx.zeros((3, 4)), mx.zeros((3, 4)))}
    mx.eval(total)
    places = [np.array(array, copy=False).ctypes.data for array in total["q"]]
    for part in parts:
        accumulate(total, {"q": (mx.array(part[0]), mx.array(part[1]))})
    assert [np.array(array, copy=False).ctypes.data for array in total["q"]] == places
    for found, expected in zip(total["q"], sum(parts), strict=True):
        assert np.allclose(found, expected, atol=1e-6)


def test_tiles_of_a_matrix_are_alike_and_no_more_than_needed(rng: Rng) -> None:
    for _ in range(300):
        rows, columns, values = (int(n) for n in rng.integers(1, (9000, 4000, 1_000_000)))
        step = rows_at_once(rows, columns, values)
        most = max(1, values // columns)
        sizes = [min(step, rows - start) for start in range(0, rows, step)]
        assert sum(sizes) == rows and max(sizes) <= most
        assert len(sizes) <= len(range(0, rows, most))
        assert step - sizes[-1] < len(sizes)  # the last lacks less than a row for each tile
    assert rows_at_once(4864, 896, 2 << 20) == 1622  # and not 2340, 2340, 184
    assert rows_at_once(300, 7, WHOLE) == 300
