"""Whatever plan is chosen, the results are the same: plans drawn at random against the oracles."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from oracles import whole_model as reference
from oracles.estimators import MonolithicMeZO
from support.bundles import Rng, Tiny
from support.estimators import copy_of, same
from support.layouts import STORED_IN_TURN, WITH_EXPERTS
from support.lengths import at_length
from support.lora import drawn_lora
from support.models import Kept, adapters_of, agree, model_of, packed_of, row_of
from support.plans import LINUX, PLENTY, predicted, task_of

from runtime.bundle.store import Bundle
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters
from runtime.methods.mebp import MeBP, StepDropout
from runtime.methods.noise import Noise
from runtime.methods.zeroth.forward_only import MOST_LANES
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.lower import Sizes
from runtime.plan.plan import Plan
from runtime.plan.size_levels import LEVELS
from runtime.run.session import open_session
from runtime.storage.activations import Activations
from runtime.storage.scratch import MappedTensors

CLOSE = 1e-5
BUCKETS = (16, 96, 128)  # of 96 and 128 tokens an MLP can take 48 and 64


def sizes(rng: Rng) -> Sizes:
    """One of the planner's own, or any other: tiny models never need its frugal ones."""
    if rng.random() < 0.3:
        return LEVELS[int(rng.integers(len(LEVELS)))]
    tile, block = int(rng.integers(300, 30_000)), int(rng.integers(1, 70))
    return Sizes(tile, block, slices=bool(rng.random() < 0.7))


def plan(bundle: Bundle, rng: Rng, method: str, rows: int, parts: int) -> Plan:
    """A plan with everything that the planner decides decided at random."""
    layers = len(bundle.manifest.layers)
    machine = msgspec.structs.replace(LINUX, arithmetic=str(rng.choice(["packed", "unpacked"])))
    task = task_of(
        int(rng.choice(bundle.manifest.buckets)),
        method,
        rows,
        parts,
        queries=int(rng.integers(1, 4)) if method == "mezo" else None,
        prefetch=bool(rng.random() < 0.5),
    )
    most = 2 if method == "mezo" else 1
    drawn = predicted(bundle.manifest, task, sizes(rng), PLENTY, most, machine)
    ways = 3 if drawn.slice_columns else 1
    kept = sorted((int(rng.integers(layers + 1)) for _ in range(ways)), reverse=True)
    kept = [*kept, 0, 0] if method == "mebp" else [0, 0, 0]
    return msgspec.structs.replace(
        drawn,
        chunk_rows=int(rng.integers(1, bundle.manifest.vocab_size + 9)),
        lanes=int(rng.integers(2, MOST_LANES + 1) if method == "mezo" else rng.integers(1, 4)),
        kept_layers=kept[0],
        kept_products=kept[1],
        kept_mlps=kept[2],
        materialized_layers=int(rng.integers(layers + 1)),
        materialized_head=machine.packed and bool(rng.random() < 0.5),
    )


def drawn_rows(bundle: Bundle, rng: Rng, bucket: int, count: int) -> list[Sample]:
    """Rows whose longest needs the bucket; some are packed ones."""
    lengths = rng.integers(1, bucket + 1, count)
    lengths[int(rng.integers(count))] = bucket
    found: list[Sample] = []
    for length in map(int, lengths):
        packed = packed_of(bundle, rng, length, 1 + length // 3)
        found.append(packed if rng.random() < 0.5 else row_of(bundle, rng, length))
    return found


def anywhere(adapters: Adapters, folder: Path, rng: Rng) -> Adapters:
    """The same adapters, on the heap or in a scratch file as a run's are."""
    if rng.random() < 0.5:
        return adapters
    mapped = MappedTensors(folder, "adapters", Adapters.shapes(adapters.manifest))
    mapped.update(adapters.tensors)
    return Adapters(adapters.manifest, mapped)


@at_length("draws", 1, 6)
@pytest.mark.parametrize(("family", "layouts"), [*STORED_IN_TURN, WITH_EXPERTS])
def test_gradients_are_autograds_under_every_plan(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path, family: str, layouts: str, draws: int
) -> None:
    exported = tiny(family, layouts, seq_lens=BUCKETS)
    for _ in range(draws):
        bundle = exported.with_lora(drawn_lora(exported, rng, dropout=True))
        manifest = bundle.manifest
        count, parts = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        chosen = plan(bundle, rng, "mebp", count, parts)
        print(manifest.lora, msgspec.structs.replace(chosen, blocks=()))
        adapters = anywhere(adapters_of(bundle, rng), tmp_path, rng)
        rows = [drawn_rows(bundle, rng, chosen.bucket, count) for _ in range(parts)]
        shape = (1, chosen.bucket, manifest.hidden_size)
        scratch = Activations(tmp_path, len(manifest.blocks), count, shape)
        kept = Kept()
        session = open_session(bundle, chosen)
        stores = bool(chosen.stored_values and rng.random() < 0.8)
        stored = Activations(tmp_path, chosen.stored_values, count, shape) if stores else None
        method = MeBP(
            session.model, adapters, scratch, kept, chosen.lanes, chosen.kept,  # type: ignore[arg-type]
            seed=seed, stored=stored,
        )  # fmt: skip
        for _ in range(2):  # what stays from one step to the next must not matter
            kept.found.clear()
            result = method.step(5, 1e-3, rows)
        dropout = StepDropout(seed, adapters.dropout, 5)
        model = reference.dense_model(bundle, adapters, dropout)
        samples = [sample for part in rows for sample in part]
        flat = [(row.tokens, row.scored) for sample in samples for row in sample.rows]
        places = [
            (number, int(start))
            for number, sample in enumerate(samples)
            for start in ([0] if sample.offsets is None else sample.offsets[:-1])
        ]
        loss, expected = reference.gradients(model, flat, places)
        assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(loss, rel=CLOSE)
        # the gradient of decays is a sum whose terms cancel, in float32 on both sides
        agree(kept.found, expected, 2 * CLOSE if family == "qwen3_5" else CLOSE)


# forwards are those of MeBP, see above
FORWARD = [("qwen2", ""), ("gemma3", "mixed"), ("qwen3_5", ""), WITH_EXPERTS]
LONGER = [pytest.param(one, "", marks=pytest.mark.slow) for one in ("gemma3", "llama", "lfm2")]


@at_length("draws", 1, 4)
@pytest.mark.parametrize(("family", "layouts"), [*FORWARD, *LONGER])
def test_mezo_is_the_monolithic_algorithm_under_every_plan(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path, family: str, layouts: str, draws: int
) -> None:
    """Bit for bit with the same tiles; with others the losses differ by rounding only."""
    exported = tiny(family, layouts, seq_lens=BUCKETS)
    for _ in range(draws):
        bundle = exported.with_lora(drawn_lora(exported, rng, dropout=False))
        count, parts, queries = (int(n) for n in rng.integers(1, (3, 3, 4)))
        chosen = plan(bundle, rng, "mezo", count, parts)
        print(msgspec.structs.replace(chosen, blocks=()))
        adapters = anywhere(adapters_of(bundle, rng), tmp_path, rng)
        noise = Noise(seed, str(rng.choice(["gaussian", "rademacher"])))
        decay = float(rng.choice([0.0, 0.1]))
        oracle = MonolithicMeZO(copy_of(adapters), noise, 1e-3, queries, decay)
        shape = (1, chosen.bucket, bundle.manifest.hidden_size)
        scratch = Activations(tmp_path, 1, 2 * queries * count * parts, shape)
        session = open_session(bundle, chosen)
        method = ZerothOrder(
            session.model, adapters, scratch, noise, 1e-3, TwoPoint(queries), decay,
            lanes=chosen.lanes,
        )  # fmt: skip
        for step in range(2):
            bucket = int(rng.choice([r for r in bundle.manifest.buckets if r <= chosen.bucket]))
            rows = [drawn_rows(bundle, rng, bucket, count) for _ in range(parts)]
            flat = [row for part in rows for row in part]
            elsewhere = reference.plain_loss(
                model_of(bundle, bucket, chosen.arithmetic), oracle.adapters, flat
            )
            here = reference.plain_loss(session.model(bucket), oracle.adapters, flat)
            assert here == pytest.approx(elsewhere, rel=CLOSE)
            loss, gradients = oracle.step(session.model(bucket), flat, step, 1e-2)
            result = method.step(step, 1e-2, rows)
            assert result.record == [1e-2, gradients]
            assert result.forward_passes == 2 * queries * count * parts
            assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(
                loss, rel=1e-12
            )
        method.settle()
        same(oracle.adapters, adapters)
