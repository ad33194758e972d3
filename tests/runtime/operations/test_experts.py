"""Experts: against the dense reference and mlx-lm's model, and what is read for which routing."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from oracles import whole_model as reference
from oracles.experts import experts
from support.bundles import Rng, Tiny, with_operations
from support.models import adapters_of, check_gradients, model_of, packed_of, rows_of

from runtime.arrays.stored import Block, Matrix
from runtime.arrays.values import Values
from runtime.arrays.weight_source import Tile
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import Manifest, block_range, dense_range
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, UsageError
from runtime.engine.model import Model
from runtime.operations.base import Call
from runtime.operations.experts import LEAST_TOKENS, Experts
from runtime.operations.experts_kernel import Routes
from runtime.operations.kernel import Run
from runtime.operations.program import Instruction
from runtime.operations.values import T
from runtime.plan.lower import Sizes, lower
from runtime.storage.weights import Weights

FAMILY, CLOSE = "qwen3-moe", 1e-5
TILE = 9000  # values: a slice has 64 columns of an expert's 256, or 128 where scales cover these


class Counted(Weights):
    """Weights that remember which parts of which matrices are read, and how many bytes."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.read: dict[int, int] = {}

    def _note(self, matrix: Matrix, share: float) -> None:
        offset = matrix.packed.offset
        self.read[offset] = self.read.get(offset, 0) + round(share * matrix.nbytes)

    def tile(self, matrix: Matrix, start: int, stop: int) -> Tile:
        self._note(matrix, (stop - start) / matrix.rows)
        return super().tile(matrix, start, stop)

    def columns(self, matrix: Matrix, start: int, stop: int) -> Tile:
        self._note(matrix, (stop - start) / matrix.columns)
        return super().columns(matrix, start, stop)


def operation_of(manifest: Manifest) -> Experts:
    (found,) = (
        one for one in manifest.block_types["layer0"].operations if isinstance(one, Experts)
    )
    return found


def routing(rng: Rng, tokens: int, operation: Experts, among: int) -> np.ndarray:
    """Two distinct experts for each token, of the first `among`."""
    return np.stack([rng.permutation(among)[:2] for _ in range(tokens)])


def given(rng: Rng, manifest: Manifest, chosen: np.ndarray) -> Values:
    x, weights, numbers = operation_of(manifest).inputs
    tokens = len(chosen)
    hidden = rng.standard_normal((1, tokens, manifest.hidden_size)).astype(np.float32)
    shares = rng.uniform(-1, 1, (1, tokens, 2)).astype(np.float32)
    return {
        x: mx.array(hidden),
        weights: mx.array(shares),
        numbers: mx.array(chosen[None].astype(np.float32)),
    }


def run_of(model: Model, block: Block, wanted: tuple[str, ...], backward: bool) -> Run:
    operation = operation_of(model.bundle.manifest)
    program = model.lowered.blocks[1].program
    instruction = Instruction(backward, operation, wanted, (), ())
    return Run(block, program, instruction, model.bucket)


def forward(model: Model, block: Block, lanes: list[Values]) -> list[mx.array]:
    operation = operation_of(model.bundle.manifest)
    kernel = model.executor.kernels[Experts]
    kernel.forward(run_of(model, block, operation.outputs, False), lanes, [{}] * len(lanes))
    return [values[operation.outputs[0]].squeeze(0) for values in lanes]


def dense_matrices(bundle: Bundle, block: Block) -> list[mx.array]:
    """Gate, up and down as (experts, rows, columns)."""
    operation, weights = operation_of(bundle.manifest), Weights(bundle)
    whole = [
        reference.dequantized(weights, bundle.manifest.matrices[name])
        for name in operation.matrices(block.tensor)
    ]
    return [one.reshape(operation.count, -1, one.shape[1]) for one in whole]


@pytest.mark.parametrize("arithmetic", ["unpacked", "packed"])
@pytest.mark.parametrize("layouts", ["", "mixed"])
def test_results_and_gradients_are_the_references(
    tiny: Tiny, rng: Rng, arithmetic: str, layouts: str
) -> None:
    """Also where all tokens go to few experts, more than are taken at once."""
    bundle = tiny(FAMILY, layouts, seq_lens=(16, 96))
    operation = operation_of(bundle.manifest)
    block = bundle.manifest.layers[1]
    dense = dense_matrices(bundle, block)
    x, weights, _ = operation.inputs
    for tokens, among in ((16, operation.count), (96, operation.count), (96, 2)):
        model = model_of(bundle, tokens, arithmetic, TILE)
        width = model.lowered.execution.expert_columns[block.tensor(operation.down)]
        assert width in (64, 128) and dense[2].shape[-1] == 256
        chosen = routing(rng, tokens, operation, among)
        assert among > 2 or tokens > LEAST_TOKENS  # in two parts
        values = given(rng, bundle.manifest, chosen)
        dy = mx.array(rng.standard_normal((1, tokens, 128)).astype(np.float32))

        def whole(hidden: mx.array, shares: mx.array) -> mx.array:
            return experts(hidden, shares, mx.array(chosen), *dense)  # noqa: B023

        inputs = [values[x].squeeze(0), values[weights].squeeze(0)]
        (expected,), gradients = mx.vjp(lambda *a: [whole(*a)], inputs, [dy.squeeze(0)])
        (found,) = forward(model, block, [dict(values)])
        assert reference.relative_error(found, expected) <= CLOSE
        kernel = model.executor.kernels[Experts]
        for wanted in ((x, weights), (weights,)):
            held = {**values, f"~{operation.outputs[0]}": dy}
            returned = kernel.backward(run_of(model, block, wanted, True), held, {}, {})
            assert tuple(returned) == wanted
            for name, gradient in zip((x, weights), gradients, strict=True):
                if name in wanted:
                    assert reference.relative_error(returned[name][0], gradient) <= CLOSE


def test_only_chosen_experts_are_read_each_once(tiny: Tiny, rng: Rng) -> None:
    """For all lanes together; the bytes are those of these experts."""
    bundle = tiny(FAMILY)
    manifest, operation = bundle.manifest, operation_of(bundle.manifest)
    block = manifest.layers[0]
    chosen = [np.tile([first, 5], (32, 1)) for first in (1, 1, 6)]
    weights = Counted(bundle)
    model = model_of(bundle, 32, tile_values=TILE, weights=weights)
    forward(model, block, [given(rng, manifest, one) for one in chosen])
    parts = [
        matrix
        for number in (1, 5, 6)
        for matrix in operation.of_one(block.tensor, manifest.matrices, number)
    ]
    assert weights.read == {part.packed.offset: part.nbytes for part in parts}
    every = [manifest.matrices[name].nbytes for name in operation.matrices(block.tensor)]
    assert sum(weights.read.values()) == sum(every) * 3 // operation.count


def test_companions_change_no_bit(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny(FAMILY, "mixed")
    operation, block = operation_of(bundle.manifest), bundle.manifest.layers[0]
    model = model_of(bundle, 32, tile_values=TILE)
    lanes = [given(rng, bundle.manifest, routing(rng, 32, operation, among)) for among in (8, 2, 3)]
    together = forward(model, block, [dict(values) for values in lanes])
    for values, found in zip(lanes, together, strict=True):
        assert mx.array_equal(forward(model, block, [values])[0], found)


def test_gradients_are_mlx_lms_and_packed_rows_do_not_mix(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    bundle = tiny(FAMILY)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    for samples, bucket in ((rows, 32), ([packed_of(bundle, rng, 60, 20)], 64)):
        found = check_gradients(dense, model_of(bundle, bucket), adapters, samples, tmp_path)
        assert {name.split(".")[-2] for name in found} == {*bundle.manifest.linear_names}
        assert "gate" in bundle.manifest.linear_names


def test_the_weights_gradient_alone_reaches_a_router(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    exported = tiny(FAMILY)
    bundle = exported.with_lora(replace(exported.manifest.lora, targets=("gate",)))
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    check_gradients(dense, model_of(bundle, 32), adapters, rows, tmp_path)


def test_a_routing_that_is_none_is_refused(tiny: Tiny) -> None:
    operation = operation_of(tiny(FAMILY).manifest)
    for numbers in ([[0, 8]], [[-1, 0]], [[3, 3]], [[float("nan"), 0]]):
        with pytest.raises(BundleError, match="export"):
            Routes.of(mx.array(numbers, mx.float32), operation)


def test_routes_have_every_choice_once(rng: Rng, tiny: Tiny) -> None:
    operation = operation_of(tiny(FAMILY).manifest)
    for tokens in (1, 33, 200):
        chosen = routing(rng, tokens, operation, int(rng.integers(2, 9)))
        routes = Routes.of(mx.array(chosen.astype(np.float32)), operation)
        found = np.full(chosen.shape, -1)
        for number in range(operation.count):
            for part in routes.parts(number):
                assert len(part.tokens) <= operation.tokens_at_once(tokens, 2)
                assert (found[part.tokens, part.slots] == -1).all()
                found[part.tokens, part.slots] = number
        assert (found == chosen).all()


def test_the_plan_counts_a_slice_of_an_expert_and_some_of_the_tokens(tiny: Tiny) -> None:
    manifest = tiny(FAMILY).manifest
    operation, found = operation_of(manifest), []
    tensor, values = manifest.layers[0].tensor, manifest.block_types["layer0"].values
    for tile, tokens in ((1 << 20, 512), (TILE, 512), (TILE, 64)):
        execution = lower(manifest, 64, Sizes(tile, 16), packed=False).execution
        for backward in (False, True):
            call = Call(backward, operation.gradients, 1, tokens, values, tensor)
            found.append(operation.working_bytes(call, execution))
    assert found[0] > found[2] > found[4] and found[1] > found[3] > found[5]
    assert operation.tokens_at_once(1024, 2) == 512 and operation.tokens_at_once(40, 2) == 40
    assert operation.tokens_at_once(256, 2) == 128  # twice the tokens that an expert has on average


def test_what_is_read_ahead_ends_before_the_experts(tiny: Tiny) -> None:
    manifest = tiny(FAMILY).manifest
    operation = operation_of(manifest)
    for block in manifest.layers:
        offsets = {
            n: manifest.matrices[n].packed.offset
            for n in manifest.matrices
            if n.startswith(block.name)
        }
        experts_at = [offsets.pop(name) for name in operation.matrices(block.tensor)]
        start, stop = dense_range(manifest, block)
        assert start == block_range(manifest, block)[0]
        assert max(offsets.values()) < stop == min(experts_at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 7}, "expected"),
        ({"count": 1}, "experts"),
        ({"down": "mlp.switch_mlp.up_proj"}, "expected"),
        ({"gate": "mlp.gate"}, "expected"),
    ],
)
def test_operations_that_do_not_fit_their_weights_are_refused(
    tiny: Tiny, changes: dict[str, object], message: str
) -> None:
    manifest = tiny(FAMILY).manifest
    with pytest.raises(BundleError, match=message):
        check_manifest(with_operations(manifest, "layer0", Experts, **changes))


def test_weights_of_another_shape_are_refused(tiny: Tiny) -> None:
    manifest = tiny(FAMILY).manifest
    block_type, weights = manifest.block_types["layer0"], operation_of(manifest).inputs[1]
    changed = replace(block_type, values={**block_type.values, weights: (1, T, 3)})
    types = {**manifest.block_types, "layer0": changed}
    with pytest.raises(BundleError, match="weights of"):
        check_manifest(replace(manifest, block_types=types, graphs={}))


def test_experts_have_no_adapters_and_are_not_trained_whole(tiny: Tiny) -> None:
    manifest = tiny(FAMILY).manifest
    targets = replace(manifest.lora, targets=("up_proj",))
    with pytest.raises(UsageError, match=r"up_proj: these are experts.*gate, k_proj"):
        targets.check_targets(manifest.linear_names, manifest.expert_names)
    assert not manifest.with_lora(targets).adapted(manifest.layers[0])
