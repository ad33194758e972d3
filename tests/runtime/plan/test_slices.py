"""An MLP that takes a slice of its width at a time: folding, its results, and what is alive."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from oracles import whole_model as reference
from oracles.whole_model import relative_error
from support.bundles import Rng, Tiny
from support.lengths import pairs
from support.lora import with_lora
from support.models import (
    FAMILIES,
    LENGTHS,
    adapters_of,
    agree,
    check_gradients,
    each_family,
    mebp,
    model_of,
    rows_of,
)
from support.plans import demand_of
from support.random_types import random_bundle

from runtime.arrays.arrays import CpuArrays
from runtime.arrays.dropout import Dropout
from runtime.arrays.stored import DRAWN
from runtime.arrays.values import accumulate
from runtime.bundle.manifest import manifest_bytes, read_manifest
from runtime.core.errors import BundleError
from runtime.machine.machine_code import lacking
from runtime.methods.mebp import StepDropout
from runtime.operations.base import Operation
from runtime.operations.elementwise import Elementwise
from runtime.operations.gated import Gated
from runtime.operations.linear import Linear, Product
from runtime.operations.program import Program
from runtime.operations.sliced_mlp import SlicedMlp
from runtime.plan.block_peaks import PeakModel
from runtime.plan.lower import Sizes, lower, rows_at_once
from runtime.plan.slices import fold, width_of
from runtime.storage.weights import Weights

WHOLE = 1 << 62  # more tokens, or values, than there are

by_both = pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.skipif(bool(lacking()), reason=lacking()))],
    ids=["by MLX", "compiled"],
)

MLP_VALUES = 10_000  # with which a slice of the small models has some columns of the width


@each_family
def test_of_a_layer_its_mlp_is_folded(tiny: Tiny, family: str) -> None:
    block_type = tiny(family, seq_lens=LENGTHS).manifest.block_types["layer0"]
    program = block_type.program("cpu")
    folded = fold(program)
    (sliced,) = [one for one in folded.operations if isinstance(one, SlicedMlp)]
    assert (sliced.inputs, sliced.outputs) == (("mlp.gate_proj.in",), ("mlp.down_proj.out",))
    assert len(folded.operations) == len(program.operations) - 2 and fold(folded) == folded
    on_gpu = block_type.program("gpu")  # which has no kernel for the activation
    assert fold(on_gpu) == on_gpu


def linear(source: str, *results: str) -> Linear:
    return Linear((source,), tuple(Product(f"m.{name}", name, False) for name in results))


def gated(*names: str) -> Gated:
    first, second, result = names
    return Gated((first, second), (result,), "silu")


def test_only_gated_mlps_whose_values_nothing_else_reads_are_folded() -> None:
    def folded(*operations: Operation, output: str = "y") -> list[type[Operation]]:
        program = Program("p", "x", output, {}, operations)
        return [type(one) for one in fold(program).operations]

    mlp = (linear("x", "a", "b"), gated("a", "b", "c"), linear("c", "y"))
    assert folded(*mlp) == [SlicedMlp]
    assert folded(mlp[0], gated("b", "a", "c"), mlp[2]) == [SlicedMlp]
    graph = Elementwise(("a", "b"), ("c",), "g")
    assert folded(mlp[0], graph, mlp[2]) == [Linear, Elementwise, Linear]
    whole = [Linear, Gated, Linear]
    assert folded(mlp[0], mlp[1], linear("c", "y", "z")) == whole
    assert folded(linear("x", "a", "b", "d"), *mlp[1:]) == whole
    assert folded(*mlp, output="c") == whole
    reader = Elementwise(("y", "a"), ("w",), "g")
    assert folded(*mlp, reader, output="w") == [*whole, Elementwise]


def test_widths_are_whole_groups_and_hold_no_more_than_asked(tiny: Tiny, rng: Rng) -> None:
    down = next(iter(tiny("qwen2").manifest.matrices.values()))
    for _ in range(200):
        group = int(rng.choice([0, 32, 64, 128]))
        unit = max(DRAWN, group)
        rows, columns = int(rng.integers(1, 3000)), unit * int(rng.integers(1, 100))
        inputs, values = int(rng.integers(1, 3000)), int(10 ** rng.uniform(2, 7))
        last = msgspec.structs.replace(down, rows=rows, columns=columns, group_size=group)
        gate = msgspec.structs.replace(down, rows=columns, columns=inputs, group_size=group)
        width = width_of(gate, last, values)
        assert width % unit == 0 and 0 < width <= columns
        assert width == unit or width * max(rows, inputs) <= values
    assert width_of(gate, last, WHOLE) == last.columns


def test_a_bundle_cannot_bring_operations_of_the_lowering(tiny: Tiny) -> None:
    """Those that it may bring are in the table; a folded or a gated one is not."""
    manifest = tiny("qwen2").manifest
    assert read_manifest(manifest_bytes(manifest), "m") == manifest
    block_type = manifest.block_types["layer0"]
    on_cpu = block_type.program("cpu")
    for tag, program in (("gated", on_cpu), ("slicedmlp", fold(on_cpu))):
        changed = msgspec.structs.replace(block_type, operations=program.operations)
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
    """Also where some layers keep what they would recompute: a slice's values are recomputed."""
    bundle = tiny(family, layouts, seq_lens=LENGTHS)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    for kept, length in enumerate(LENGTHS):
        model = model_of(bundle, length, arithmetic, MLP_VALUES, slices=True)
        matrix = bundle.manifest.matrices["model.layers.0.mlp.down_proj"]
        assert len([*model.matrices.ranges(matrix)]) > 1
        check_gradients(dense, model, adapters, rows, tmp_path, kept)


@by_both
@pytest.mark.parametrize(("model_type", "halves"), [("phi3", 2), ("gpt2", 1)])
def test_both_halves_of_a_matrix_and_mlps_without_a_gate(
    rng: Rng, tmp_path: Path, model_type: str, halves: int, compiled: bool
) -> None:
    """With dropout and biases: the oracle's gradients, bits of lanes, and tiles that stay."""
    bits = 8 if compiled else 32
    bundle = with_lora(random_bundle(tmp_path, model_type, bits), dropout=0.2)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dropout = StepDropout(3, 0.2, 1)
    dense = reference.dense_model(bundle, adapters, dropout)
    places = [(number, 0) for number, _ in enumerate(rows)]
    given = [(row.tokens, row.scored) for row in rows]
    expected_loss, expected = reference.gradients(dense, given, places)
    model = model_of(bundle, 64, tile_values=5000, slices=True, compiled=compiled)
    loss, found = mebp(model, adapters, rows, tmp_path, dropout=dropout)
    assert loss.loss_sum / loss.scored_tokens == pytest.approx(expected_loss, rel=1e-5)
    agree(found, expected)
    block = model.blocks[1]
    (mlp,) = [one for one in model.lowered.blocks[1].program.operations if type(one) is SlicedMlp]
    (matrix,) = [bundle.manifest.matrices[name] for name in mlp.into.matrices(block.tensor)]
    (down,) = [bundle.manifest.matrices[name] for name in mlp.down.matrices(block.tensor)]
    ranges, step = (
        [*model.matrices.ranges(matrix)],
        mlp.width(block.tensor, model.lowered.execution, False),
    )
    parts = [(at, min(at + step, down.columns)) for at in range(0, down.columns, step)]
    assert len(parts) > 1 and ranges == [
        (half * down.columns + start, half * down.columns + stop)
        for half in range(halves)
        for start, stop in parts
    ]
    loras = [adapters_of(bundle, rng).loras(block) for _ in range(3)]
    xs = [mx.array(rng.standard_normal((1, 64, 64)).astype(np.float32)) for _ in loras]
    together = model.forward_lanes(block, list(xs), loras)
    model.matrices.materialize([matrix])
    alone = [model.forward(block, x, lora) for x, lora in zip(xs, loras, strict=True)]
    assert all(mx.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    stay = [] if compiled else ranges
    assert {*model.matrices.materialized} == {(matrix.packed.offset, *part) for part in stay}


@by_both
def test_more_tokens_than_are_taken_at_once(
    tiny: Tiny, rng: Rng, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Part by part, with one mask of dropout and one sum of gradients."""
    bundle = with_lora(tiny("qwen3", seq_lens=LENGTHS), dropout=0.2)
    adapters = adapters_of(bundle, rng)
    model = model_of(bundle, 128, tile_values=MLP_VALUES, slices=True, compiled=compiled)
    block = model.blocks[2]
    loras = StepDropout(7, 0.2, 3).of_row(block, adapters.loras(block), 0)
    shape = (1, 128, bundle.manifest.hidden_size)
    x, dy = (mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
    found = []
    for most in (128, 50):
        for module in ("sliced_mlp", "sliced_mlp_kernel"):
            monkeypatch.setattr(f"runtime.operations.{module}.MOST_TOKENS", most)
        y = model.forward(block, x, loras)
        dx, gradients = model.backward(block, x, dy, loras)
        assert dx is not None
        found.append([y, dx, *(part for name in sorted(gradients) for part in gradients[name])])
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(*found, strict=True))


def test_one_adapter_alone_is_trained(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    """The lowest layer with nothing to train below its MLP, or only above it."""
    exported = tiny("gemma3", seq_lens=LENGTHS)
    for target in ("down_proj", "o_proj", "up_proj"):
        bundle = with_lora(exported, targets=(target,))
        adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
        model = model_of(bundle, 128, tile_values=MLP_VALUES, slices=True)
        dense = reference.dense_model(bundle, adapters)
        check_gradients(dense, model, adapters, rows, tmp_path)


@by_both
@each_family
def test_companions_change_no_bit(tiny: Tiny, rng: Rng, family: str, compiled: bool) -> None:
    bundle = tiny(family, "" if compiled else "mixed", seq_lens=LENGTHS)
    model = model_of(bundle, 128, tile_values=MLP_VALUES, slices=True, compiled=compiled)
    block = model.blocks[1]
    loras = [adapters_of(bundle, rng).loras(block) for _ in range(3)]
    shape = (1, 128, bundle.manifest.hidden_size)
    xs = [mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in loras]
    alone = [model.forward(block, x, lora) for x, lora in zip(xs, loras, strict=True)]
    together = model.forward_lanes(block, list(xs), loras)
    assert all(mx.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_what_is_alive_falls_with_the_slice(tiny: Tiny, method: str) -> None:
    manifest = tiny("llama", seq_lens=(1024,)).manifest
    found = []
    for slices, values in ((False, WHOLE), (True, 5000), (True, 1)):
        lowered = lower(manifest, 1024, Sizes(values, 16, slices=slices), packed=False)
        block = PeakModel(manifest, lowered, demand_of(method)).block(2, 2)
        found.append(max(block.forward_bytes, block.backward_bytes))
    assert found == sorted(found, reverse=True) and found[2] < 0.95 * found[0]


def test_columns_are_those_of_the_rows(tiny: Tiny) -> None:
    bundle = tiny("llama", "mixed")
    weights = Weights(bundle)
    for matrix in bundle.manifest.matrices.values():
        whole = weights.tile(matrix, 0, matrix.rows)
        unit = matrix.group_size or 1
        first, last = unit, min(matrix.columns, 3 * unit)
        part = weights.columns(matrix, first, last)
        for ours, theirs in zip(part.arrays, whole.arrays, strict=True):
            a, b = (at * theirs.shape[1] // matrix.columns for at in (first, last))
            assert mx.array_equal(ours, theirs[:, a:b])
        assert (part.shift is None) == (whole.shift is None)
        if part.shift is not None and whole.shift is not None:
            groups = slice(first // unit, last // unit)
            assert mx.array_equal(part.shift, whole.shift[:, groups])


def test_a_mask_is_the_same_for_any_columns(rng: Rng) -> None:
    dropout = Dropout(int(rng.integers(1 << 62)), 0.3, first=5)
    whole = np.array(dropout.mask(6, 200).remaining)
    assert 0.6 < whole.mean() < 0.8
    for _ in range(20):
        start, stop = sorted(rng.choice(201, 2, replace=False).tolist())
        part = dropout.mask(6, stop - start, start)
        assert np.array_equal(np.array(part.remaining), whole[:, start:stop])


def test_gradients_add_up_in_their_place(rng: Rng) -> None:
    """What is there before stays where it is, and is not allocated again."""
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
