"""A block as one evaluation, on a GPU, or where there is none: its arrays and graphs on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.estimators import copy_of, mezo_of
from support.layouts import STORED, WITH_EXPERTS
from support.lengths import pairs
from support.lora import with_lora
from support.models import (
    FAMILIES,
    LENGTHS,
    MIXERS,
    adapters_of,
    agree,
    mebp,
    model_of,
    packed_of,
    row_of,
)
from support.plans import MAC, PLENTY, predicted, task_of
from support.random_types import random_bundle

from export import graph_files
from export.graph_files import trace_graphs
from runtime.arrays.arrays import Arrays
from runtime.arrays.products import Products
from runtime.arrays.tile_products import ReadyTile
from runtime.bundle.checks import check_manifest
from runtime.bundle.store import Bundle
from runtime.bundle.traced import read_traced
from runtime.core.errors import BundleError
from runtime.engine.model import Model
from runtime.machine.backend import use_device
from runtime.methods.mebp import StepDropout
from runtime.operations import head_kernel
from runtime.operations.elementwise import Elementwise
from runtime.operations.values import dtype_of
from runtime.plan.lower import Sizes
from runtime.plan.plan import Plan
from runtime.plan.size_levels import BLOCK, LEVELS, OPERATIONS
from runtime.run import session
from runtime.run.session import Session, open_session
from runtime.storage.activations import Activations

MOST = 10  # evaluations of a block in one pass, each operation by itself or the head
# linear attention is an operation more; experts are evaluated one by one: there may be hundreds
MORE = {"qwen3_5": 1, "qwen3-moe": 8}
# of two layers to four, with what no preset has; and names of adapted ends, tied and not
OF_TYPES = {
    **{name: (name,) for name in ("phi3", "opt", "gemma4_text", "lfm2_moe", "gpt_oss")},
    "tied ends": ("qwen2", "embed_tokens", "down_proj"),
    "ends": ("llama", "embed_tokens", "lm_head", "q_proj"),
}
# experts, which are evaluated one by one; and products with what goes along with hidden values
OF_TYPES_MORE = {"lfm2_moe": 4, "gpt_oss": 4, "gemma4_text": 7}
STORED_ONCE = [("qwen2", ""), ("gemma3", "mixed"), ("llama", "")]
OTHERS = [*((family, "") for family in MIXERS), WITH_EXPERTS]
MODES = [
    (0, "operation"),
    (0, "block"),
    (2, "block"),
]  # layers that are kept, and what is evaluated
MORE_STORED = [
    pytest.param(*stored, *mode, marks=pytest.mark.slow)
    for stored, mode in product(STORED, MODES)
    if stored not in STORED_ONCE
]
WITHIN_ROUNDING = 2.0**-3  # 32 times that of bfloat16; MLX rounds weights by 2**-8 too


def with_gpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, sum in float32: MLX's CPU rounds every sum to bfloat16."""
    if not mx.is_available(mx.gpu):
        monkeypatch.setattr(mx, "quantized_matmul", partial(_product, mx.quantized_matmul))


def _product(
    original: Any, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, **how: Any
) -> mx.array:
    if x.dtype == mx.float32:
        return original(x, w, scales, biases, **how)
    whole = mx.dequantize(w, scales, biases, how["group_size"], how["bits"])
    return x @ (whole.T if how["transpose"] else whole)


PASSES = (
    "embed", "forward_lanes", "forward_keeping", "hidden", "losses", "head_backward", "backward"
)  # fmt: skip
Traced = Callable[..., Bundle]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """placed(bundle): the bundle with graphs traced for a GPU; without one they run on the CPU.

    With `both`, those of bfloat16 too.
    """
    known: dict[tuple[Path, bool], Bundle] = {}

    def trace(bundle: Bundle, both: bool = False) -> Bundle:
        if (bundle.path, both) not in known:
            folder = tmp_path_factory.mktemp("traced")
            with pytest.MonkeyPatch.context() as patch:
                if not both:
                    patch.setattr(Elementwise, "dtypes", lambda self, device: ("float32",))
                trace_graphs(bundle.manifest, "gpu", folder)
            manifest = read_traced(folder).put_into(bundle.manifest)
            known[bundle.path, both] = replace(bundle, manifest=manifest, graphs_path=folder)
        return known[bundle.path, both]

    with pytest.MonkeyPatch.context() as patch:
        if mx.is_available(mx.gpu):
            yield trace
            return
        patch.setattr(graph_files, "set_device", lambda name: name)
        patch.setattr(session, "use_device", lambda device: None)
        yield trace


@dataclass
class Evaluations:
    """How often `mx.eval` is called in each pass of a block, and in all."""

    count: int = 0
    passes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return max(max(counts) for counts in self.passes.values())


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    found, evaluate = Evaluations(), mx.eval

    def counted(*arrays: object) -> None:
        found.count += 1
        evaluate(*arrays)

    def watch(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def watched(*arguments: object, **options: object) -> object:
            before = found.count
            result = method(*arguments, **options)
            found.passes.setdefault(name, []).append(found.count - before)
            return result

        return watched

    for name in PASSES:
        monkeypatch.setattr(Model, name, watch(name, getattr(Model, name)))
    monkeypatch.setattr(mx, "eval", counted)
    return found


def small(rng: Rng, evaluation: str) -> Sizes:
    """Sizes at which there are many tiles of everything that has tiles."""
    block, tile = int(rng.integers(16, 40)), int(rng.integers(4_000, 20_000))
    sizes = BLOCK if evaluation == "block" else OPERATIONS[0]
    return replace(sizes, attention_block=block, tile_values=tile)


def opened(bundle: Bundle, sizes: Sizes, method: str, bucket: int, lanes: int = 1) -> Session:
    task = task_of(bucket, method)
    return open_session(bundle, predicted(bundle.manifest, task, sizes, PLENTY, lanes, MAC))


def peak_of(plan: Plan, run: Callable[[], object]) -> tuple[int, int]:
    """MLX's bytes at the peak of a run, above those before it; and how many the plan says.

    NVIDIA's library of products takes 32 MB for itself, which no plan counts.
    """
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    workspace = 32 << 20 if mx.cuda.is_available() else 0
    return mx.get_peak_memory() - before, plan.active_bytes + workspace


@pytest.mark.parametrize(
    ("family", "layouts", "kept", "evaluation"),
    [*pairs([*STORED_ONCE, *OTHERS], MODES), *MORE_STORED],
)
def test_gradients_are_the_oracles_and_the_cpus(
    tiny: Tiny,
    placed: Traced,
    rng: Rng,
    seed: int,
    tmp_path: Path,
    evaluations: Evaluations,
    family: str,
    layouts: str,
    kept: int,
    evaluation: str,
) -> None:
    """In a few evaluations, whatever the tiles, and within the bytes that the plan says."""
    dropout = 0.2 if family == "qwen2" and not kept else 0.0  # drawing it takes the most time
    plain = with_lora(tiny(family, layouts, seq_lens=LENGTHS), dropout=dropout)
    bundle = with_lora(placed(tiny(family, layouts, seq_lens=LENGTHS)), dropout=dropout)
    bucket = min(LENGTHS)
    opening = opened(bundle, small(rng, evaluation), "mebp", bucket)
    model = opening.model(bucket)
    assert model.lowered.execution.one_evaluation and model.arrays == Arrays(True)
    adapters = adapters_of(bundle, rng)
    mx.eval(adapters.tensors)
    row = packed_of(bundle, rng, bucket, 50) if kept else row_of(bundle, rng, bucket)
    masks = StepDropout(seed, dropout, 3)
    found: dict[str, mx.array] = {}

    def run() -> None:
        loss, gradients = mebp(model, adapters, [row], tmp_path, kept, masks)
        found.update(gradients, loss=mx.array(loss.loss_sum))

    peak, most = peak_of(opening.plan, run)
    print(evaluations, peak, most)
    assert evaluations.most <= MOST + MORE.get(family, 0)
    assert set(evaluations.passes) >= {"backward", "losses"}
    assert peak <= most + kept * sum(value.nbytes for value in adapters.tensors.values())
    loss = float(found.pop("loss"))
    mx.set_default_device(mx.cpu)
    starts = [0] if row.offsets is None else row.offsets[:-1]
    flat = [(one.tokens, one.scored) for one in row.rows]
    dense = reference.dense_model(plain, adapters, masks)
    expected_loss, expected = reference.gradients(dense, flat, [(0, int(s)) for s in starts])
    assert loss / len(row.targets) == pytest.approx(expected_loss, rel=1e-5)
    agree(found, expected)
    on_cpu = mebp(model_of(plain, bucket), adapters, [row], tmp_path, kept, masks)[1]
    agree(found, on_cpu)


@pytest.mark.parametrize(
    ("family", "evaluation"), pairs([*FAMILIES, *MIXERS, "qwen3-moe"], ["operation", "block"])
)
def test_mezo_steps_are_the_cpus(
    tiny: Tiny,
    placed: Traced,
    rng: Rng,
    seed: int,
    tmp_path: Path,
    evaluations: Evaluations,
    family: str,
    evaluation: str,
) -> None:
    plain = tiny(family, seq_lens=LENGTHS)
    bundle = placed(plain)
    bucket, start = min(LENGTHS), adapters_of(plain, rng)
    opening = opened(bundle, small(rng, evaluation), "mezo", bucket, lanes=2)
    row = row_of(plain, rng, bucket)
    losses, bounds = [], (MOST + MORE.get(family, 0), 1000)
    for model, most in zip((opening.model(bucket), model_of(plain, bucket)), bounds, strict=True):
        use_device(model.bundle.manifest.device if mx.is_available(mx.gpu) else "cpu")
        adapters = type(start)(plain.manifest, dict(start.tensors))
        method = mezo_of(model, adapters, tmp_path, seed, 1, lanes=2)
        evaluations.passes.clear()
        results = []
        peak, planned = peak_of(
            opening.plan,
            lambda results=results, method=method: results.append(method.step(0, 1e-3, [[row]])),
        )
        losses.append(results[0].loss.loss_sum)
        print(evaluations)
        assert evaluations.most <= most
        before = evaluations.count
        method.settle()
        assert evaluations.count - before == len(plain.manifest.layers)
        assert most == 1000 or peak <= planned
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "evaluation"), [("qwen2", "operation"), ("qwen2", "part"), ("gemma3", "block")]
)
def test_in_bfloat16_gradients_lie_within_rounding_of_float64(
    tiny: Tiny,
    placed: Traced,
    rng: Rng,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluations: Evaluations,
    family: str,
    evaluation: str,
) -> None:
    """They are float32, as logits are; values and what is stored between blocks are bfloat16."""
    with_gpu_products(monkeypatch)
    bundle = placed(tiny(family, "mixed", seq_lens=LENGTHS), both=True)
    bundle = with_lora(bundle, targets=("embed_tokens", "q_proj", "down_proj"))  # tied
    bucket, kept = min(LENGTHS), 2 if evaluation == "block" else 0
    sizes = LEVELS[-1] if evaluation == "part" else small(rng, evaluation)
    machine = msgspec.structs.replace(MAC, compute_dtype="bfloat16")
    plan = predicted(bundle.manifest, task_of(bucket, "mebp"), sizes, PLENTY, 1, machine)
    plan = msgspec.structs.replace(plan, materialized_head=evaluation == "block")
    model = open_session(bundle, plan).model(bucket)
    adapters, row = adapters_of(bundle, rng), row_of(bundle, rng, bucket)
    mx.eval(adapters.tensors)
    stored: set[mx.Dtype] = set()
    put = Activations.put

    def seen(self: Activations, slot: int, number: int, value: mx.array) -> None:
        stored.add(value.dtype)
        put(self, slot, number, value)

    monkeypatch.setattr(Activations, "put", seen)
    of_heads: list[type] = []
    for part in (head_kernel._Lane, head_kernel._Adapted):

        def add(self: Any, chunk: ReadyTile, *others: Any, original: Any = part.add) -> None:
            of_heads.append(type(chunk.products))
            original(self, chunk, *others)

        monkeypatch.setattr(part, "add", add)
    found: dict[str, mx.array] = {}

    def run() -> None:
        loss, gradients = mebp(model, adapters, [row], tmp_path, kept)
        found.update(gradients, loss=mx.array(loss.loss_sum / len(row.targets)))

    peak, most = peak_of(plan, run)
    print(evaluations, peak, most)
    assert evaluation == "part" or (evaluations.most <= MOST and peak <= most + plan.kept_bytes)
    assert stored == {mx.bfloat16}
    assert len(of_heads) >= 2 and {*of_heads} == {Products}
    assert {value.dtype for value in found.values()} == {mx.float32}
    mx.set_default_device(mx.cpu)
    dense = reference.in_double(reference.dense_model(bundle, adapters))
    expected_loss, expected = reference.gradients(dense, [(row.tokens, row.scored)])
    assert float(found.pop("loss")) == pytest.approx(expected_loss, rel=1e-2)
    agree(found, expected, WITHIN_ROUNDING)


@pytest.mark.parametrize(
    ("case", "evaluation"),
    [
        pytest.param(*each, marks=() if each == ("gemma4_text", "block") else pytest.mark.slow)
        for each in product(OF_TYPES, ("operation", "block"))
    ],
)
def test_other_types_and_adapted_ends_are_the_cpus(
    placed: Traced,
    rng: Rng,
    seed: int,
    tmp_path: Path,
    evaluations: Evaluations,
    case: str,
    evaluation: str,
) -> None:
    """MeBP's gradients and MeZO's loss; few evaluations, within the bytes that the plan says."""
    (tmp_path / "placed").mkdir()
    model_type, *targets = OF_TYPES[case]
    plain = random_bundle(tmp_path, model_type, 4)
    lora = {"targets": tuple(targets)} if targets else {}
    plain, bundle = (with_lora(one, **lora) for one in (plain, placed(plain)))
    bucket, sizes = plain.manifest.buckets[0], small(rng, evaluation)
    adapters, row = adapters_of(plain, rng), row_of(plain, rng, bucket)
    mx.eval(adapters.tensors)
    opening = opened(bundle, sizes, "mebp", bucket)
    found: list[dict[str, mx.array]] = []
    peak, most = peak_of(
        opening.plan,
        lambda: found.append(mebp(opening.model(bucket), adapters, [row], tmp_path / "placed")[1]),
    )
    print(evaluations, peak, most)
    assert evaluations.most <= MOST + OF_TYPES_MORE.get(model_type, 0) and peak <= most
    opening = opened(bundle, sizes, "mezo", bucket, lanes=2)
    losses = []
    for model in (opening.model(bucket), model_of(plain, bucket)):
        use_device(model.bundle.manifest.device if mx.is_available(mx.gpu) else "cpu")
        method = mezo_of(model, copy_of(adapters), tmp_path, seed, 1, lanes=2)
        losses.append(method.step(0, 1e-3, [[row]]).loss.loss_sum)
        method.settle()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    agree(found[0], mebp(model_of(plain, bucket), adapters, [row], tmp_path)[1])


def test_graphs_for_a_gpu_are_there_for_tiles_and_for_whole_buckets(
    tiny: Tiny, placed: Traced
) -> None:
    """And for values of both types."""
    plain = tiny("qwen2", seq_lens=LENGTHS).manifest
    graphs = placed(tiny("qwen2", seq_lens=LENGTHS), both=True).manifest.graphs
    short = {key for key in graphs if dtype_of(key) == "bfloat16"}
    longer = {key.rpartition(".")[2] for key in set(graphs) - set(plain.graphs) - short}
    assert set(plain.graphs) < set(graphs) and longer == set(map(str, LENGTHS))
    named = {key.replace(".bfloat16", "") for key in short}
    assert named == {key for key in set(graphs) - short if int(key.rpartition(".")[2]) > 16}
    with pytest.raises(BundleError, match="no vjp graph for 96 tokens in bfloat16"):
        fewer = {key: graph for key, graph in graphs.items() if key != max(short)}
        check_manifest(msgspec.structs.replace(plain, device="gpu", graphs=fewer))
    with pytest.raises(BundleError, match="no forward graph for 96 tokens"):
        check_manifest(msgspec.structs.replace(plain, device="gpu"))


@pytest.mark.parametrize("shape", [(40, 6), (3, 40, 6)])
def test_what_is_added_to_a_part_is_added_in_place(rng: Rng, shape: tuple[int, ...]) -> None:
    """No copy of the whole is made, which is held by nobody else."""
    large = (*shape[:-1], 4096)
    where = (*(slice(None),) * (len(shape) - 2), slice(5, 17))
    values = rng.standard_normal(large).astype(np.float32)
    part = mx.array(rng.standard_normal((12, 4096)).astype(np.float32))
    for arrays in (Arrays(), Arrays(one_evaluation=True)):
        whole = mx.array(values)
        expected = values.copy()
        expected[where] += 2 * np.array(part)
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        arrays.add_to(whole, where, part)
        arrays.add_to(whole, where, part)
        mx.eval(whole)
        assert mx.get_peak_memory() - before < whole.nbytes / 2
        np.testing.assert_allclose(np.array(whole), expected, rtol=1e-6, atol=1e-6)
