"""A shorter sequence bucket is lowered in the same way, and changes no result."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.bundles import Rng, Tiny
from support.models import BUCKETS, CLOSE, LENGTHS, adapters_of, agree, each_family, mebp, rows_of
from support.plans import PLENTY, demand_of, predicted, task_of

from runtime.bundle.store import Bundle
from runtime.engine.graphs import Graphs
from runtime.plan.block_peaks import PeakModel
from runtime.plan.lower import Sizes, lower
from runtime.plan.plan import Plan
from runtime.run.session import Session
from runtime.storage.weights import Weights


def planned(bundle: Bundle, bucket: int, slices: bool = False, layers: int = 0) -> Plan:
    sizes = Sizes(3000, 7, slices=slices)
    plan = predicted(bundle.manifest, task_of(bucket), sizes, PLENTY)
    return msgspec.structs.replace(plan, materialized_layers=layers)


def session_of(bundle: Bundle, plan: Plan) -> Session:
    session = Session(bundle, plan, Weights(bundle), Graphs(bundle))
    session.materialize()
    return session


@pytest.mark.parametrize("slices", [False, True])
@each_family
def test_a_shorter_bucket_is_lowered_alike_and_takes_no_more(
    tiny: Tiny, family: str, slices: bool
) -> None:
    bundle = tiny(family, seq_lens=(*BUCKETS, *LENGTHS))
    plan = planned(bundle, 128, slices)
    session = session_of(bundle, plan)
    longest = session.model(128)
    assert longest.bucket == 128 and bool(longest.lowered.slice_columns) == slices
    peaks = {}
    for bucket in (*BUCKETS, *LENGTHS):
        model = session.model(bucket)
        assert model.bucket == bucket and session.model(bucket - 1) is model
        assert model.lowered == lower(bundle.manifest, bucket, plan.sizes, packed=False)
        assert model.graphs is longest.graphs and model.materialized is longest.materialized
        peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"))
        blocks = [peak.block(index, 1) for index in range(len(bundle.manifest.blocks))]
        peaks[bucket] = max(max(one.forward_bytes, one.backward_bytes) for one in blocks)
    assert list(peaks.values()) == sorted(peaks.values())  # so that a plan for the longest holds


def test_a_row_gives_the_same_gradients_at_every_bucket(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    bundle = tiny("gemma3", seq_lens=(*BUCKETS, *LENGTHS))
    session = session_of(bundle, planned(bundle, 128, 64, layers=1))
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng, (15, 9))
    loss, expected = mebp(session.model(128), adapters, rows, tmp_path)
    for length in (16, 32, 64, 96):
        model = session.model(length)
        assert model.bucket == length
        again, found = mebp(model, adapters, rows, tmp_path)
        assert again.loss_sum == pytest.approx(loss.loss_sum, rel=CLOSE)
        agree(found, expected)
    first = {matrix.packed.offset for matrix in bundle.manifest.matrices_of(model.blocks[1])}
    assert {offset for offset, *_ in model.materialized} == first  # of one layer, for all models


def test_a_row_takes_the_shortest_bucket_that_holds_it(tiny: Tiny) -> None:
    bundle = tiny("llama", seq_lens=(32, 67, 128))
    for bucket in (128, 32):
        session = session_of(bundle, planned(bundle, bucket, slices=True))
        found = [session.model(length).bucket for length in (20, 32, 33, 67, 68)]
        assert found == [32, 32, 67, 67, 128]
