"""An MLP that takes a tile of tokens at a time: folding, its results, and what is alive in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.lengths import pairs
from support.lora import with_lora
from support.models import (
    FAMILIES,
    LENGTHS,
    adapters_of,
    agree,
    each_family,
    mebp,
    model_of,
    rows_of,
)
from support.plans import demand_of

from runtime.arrays.arrays import CpuArrays
from runtime.arrays.values import accumulate
from runtime.bundle.manifest import manifest_bytes, read_manifest
from runtime.core.errors import BundleError
from runtime.operations.base import WHOLE, Operation
from runtime.operations.elementwise import Elementwise
from runtime.operations.gated import Gated
from runtime.operations.linear import Linear, Product
from runtime.operations.program import Program
from runtime.operations.tiled import Tiled
from runtime.plan.block_peaks import PeakModel
from runtime.plan.lower import Sizes, lower, rows_at_once
from runtime.plan.token_tiles import fold, tile_tokens, tiled_of, unfold


@pytest.mark.parametrize(("device", "between"), [("cpu", Gated), ("gpu", Elementwise)])
@each_family
def test_of_a_layer_its_mlp_is_folded(
    tiny: Tiny, family: str, device: str, between: type[Operation]
) -> None:
    program = tiny(family, seq_lens=LENGTHS).manifest.block_types["layer0"].program(device)
    folded = fold(program)
    (tiled,) = [one for one in folded.operations if isinstance(one, Tiled)]
    assert tiled is tiled_of(folded) and tiled_of(program) is None
    assert (tiled.inputs, tiled.outputs) == (("mlp.gate_proj.in",), ("mlp.down_proj.out",))
    assert [type(one) for one in tiled.inside] == [Linear, between, Linear]
    assert len(folded.operations) == len(program.operations) - 2
    inner = unfold(folded, tiled)
    assert inner.operations == tiled.inside and fold(folded) == folded
    assert inner.name != folded.name
    assert (inner.input, inner.output) == (tiled.inputs[0], tiled.outputs[0])


def program_of(*operations: Operation, output: str = "y") -> Program:
    return Program("p", "x", output, {}, operations)


def linear(source: str, *results: str) -> Linear:
    return Linear((source,), tuple(Product(f"m.{name}", name, False) for name in results))


def graph(*names: str, tokenwise: bool = True) -> Elementwise:
    return Elementwise(names[:-1], names[-1:], "g", tokenwise=tokenwise)


def folded_types(*operations: Operation) -> list[type[Operation]]:
    return [type(one) for one in fold(program_of(*operations)).operations]


def test_only_closed_stretches_of_token_wise_operations_are_folded() -> None:
    mlp = (linear("x", "a", "b"), graph("a", "b", "c"), linear("c", "y"))
    assert folded_types(*mlp) == [Tiled]
    mixing = (mlp[0], graph("a", "b", "c", tokenwise=False), mlp[2])
    two_ends = (mlp[0], mlp[1], linear("c", "y", "z"))
    for operations in (mixing, two_ends, mlp[:2]):
        assert fold(program_of(*operations)) == program_of(*operations)
    read_later = program_of(*mlp, graph("y", "a", "w", tokenwise=False), output="w")
    reads_more = (mlp[0], graph("a", "b", "x", "c"), mlp[2])
    assert fold(read_later) == read_later
    assert folded_types(*reads_more) == [Tiled]  # x is what it begins with
    from_elsewhere = program_of(
        linear("x", "r"),
        graph("r", "s", tokenwise=False),
        linear("s", "a"),
        graph("a", "r", "c"),
        linear("c", "y"),
    )
    assert fold(from_elsewhere) == from_elsewhere


@pytest.mark.parametrize(
    ("bucket", "most", "tile"),
    [(128, WHOLE, 128), (128, 127, 64), (128, 1, 64), (96, 95, 48), (4096, 1000, 512),
     (192, 128, 64), (384, 200, 192), (64, 16, 64), (65, 16, 65)],
)  # fmt: skip
def test_tiles_are_multiples_of_the_graphs_and_divide_the_bucket(
    bucket: int, most: int, tile: int
) -> None:
    program = fold(program_of(linear("x", "a"), graph("a", "c"), linear("c", "y")))
    assert tile_tokens(program, bucket, most) == tile
    assert tile_tokens(replace(program, operations=()), bucket, most) == bucket


def test_a_bundle_cannot_bring_operations_of_the_lowering(tiny: Tiny) -> None:
    """Those that it may bring are in the table; a folded or a gated one is not."""
    manifest = tiny("qwen2").manifest
    assert read_manifest(manifest_bytes(manifest), "m") == manifest
    block_type = manifest.block_types["layer0"]
    on_cpu = block_type.program("cpu")
    for tag, program in (("gated", on_cpu), ("tiled", fold(on_cpu))):
        brought = [one for one in program.operations if one.label != "gated" or tag == "gated"]
        changed = msgspec.structs.replace(block_type, operations=tuple(brought))
        types = {**manifest.block_types, "layer0": changed}
        written = manifest_bytes(msgspec.structs.replace(manifest, block_types=types))
        with pytest.raises(BundleError, match=f"Invalid value '{tag}'"):
            read_manifest(written, "m")


@pytest.mark.parametrize(
    ("family", "arithmetic", "layouts"), pairs(FAMILIES, [("packed", ""), ("unpacked", "mixed")])
)
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, arithmetic: str, layouts: str
) -> None:
    """Also where some layers keep what they would recompute: what is tiled is recomputed."""
    bundle = tiny(family, layouts, seq_lens=LENGTHS)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    expected_loss, expected = reference.gradients(dense, [(r.tokens, r.scored) for r in rows])
    for kept in (0, 1):
        for length in LENGTHS:
            model = model_of(bundle, length, arithmetic, most_tokens=1)
            loss, found = mebp(model, adapters, rows, tmp_path, kept)
            assert loss.loss_sum / loss.scored_tokens == pytest.approx(expected_loss, rel=1e-5)
            agree(found, expected)


def test_one_adapter_alone_is_trained(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    """The lowest layer with nothing to train below its MLP, or only above it."""
    exported = tiny("gemma3", seq_lens=LENGTHS)
    for target in ("down_proj", "o_proj", "up_proj"):
        bundle = with_lora(exported, targets=(target,))
        adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
        model = model_of(bundle, 128, most_tokens=64)
        _, found = mebp(model, adapters, rows, tmp_path)
        dense = reference.dense_model(bundle, adapters)
        agree(found, reference.gradients(dense, [(r.tokens, r.scored) for r in rows])[1])


@each_family
def test_companions_change_no_bit(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family, "mixed", seq_lens=LENGTHS)
    model = model_of(bundle, 128, most_tokens=64)
    block = model.blocks[1]
    loras = [adapters_of(bundle, rng).loras(block) for _ in range(3)]
    shape = (1, 128, bundle.manifest.hidden_size)
    xs = [mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in loras]
    alone = [model.forward(block, x, lora) for x, lora in zip(xs, loras, strict=True)]
    together = model.forward_lanes(block, list(xs), loras)
    assert all(mx.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_what_is_alive_falls_with_the_tile(tiny: Tiny, method: str) -> None:
    manifest = tiny("llama", seq_lens=(1024,)).manifest
    found = []
    for most in (WHOLE, 512, 64):
        lowered = lower(manifest, 1024, Sizes(1 << 12, 16, most_tokens=most), packed=False)
        block = PeakModel(manifest, lowered, demand_of(method), "float32").block(2, 2)
        found.append(max(block.forward_bytes, block.backward_bytes))
        assert lowered.tile_tokens == min(most, 1024)
    assert found == sorted(found, reverse=True) and found[1] < 0.9 * found[0]


def test_gradients_add_up_in_their_place(rng: Rng) -> None:
    """What is there before the tiles stays where it is: else it would lie in the tiles' holes."""
    parts = [rng.standard_normal((2, 3, 4)).astype(np.float32) for _ in range(3)]
    total = {"q": (mx.zeros((3, 4)), mx.zeros((3, 4)))}
    mx.eval(total)
    places = [np.array(array, copy=False).ctypes.data for array in total["q"]]
    for part in parts:
        accumulate(total, {"q": (mx.array(part[0]), mx.array(part[1]))}, CpuArrays())
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
