"""A shorter sequence bucket is lowered in the same way, and changes no result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.models import (
    BUCKETS,
    CLOSE,
    FAMILIES,
    LENGTHS,
    adapters_of,
    agree,
    mebp,
    rows_of,
)
from support.plans import demand_of

from runtime.bundle.store import Bundle
from runtime.engine.graphs import Graphs
from runtime.machine.machine import Blas, Machine
from runtime.operations.base import WHOLE
from runtime.operations.instruction import Instruction
from runtime.plan.lower import LoweredModel, Sizes, lower
from runtime.plan.peak import PeakModel
from runtime.plan.plan import Plan, Planner, Request
from runtime.run.open import Session
from runtime.storage.weights import Weights

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


MACHINE = Machine(
    device="cpu",
    arithmetic="unpacked",
    allocator="glibc",
    process_bytes=30_000_000,
    blas=Blas(1, 1_100_000, 1280),
)


def planned(bundle: Bundle, bucket: int, most_tokens: int = WHOLE, layers: int = 0) -> Plan:
    sizes = Sizes(3000, 7, most_tokens=most_tokens)
    planner = Planner(bundle.manifest, MACHINE)
    plan = planner.predict(Request(bucket), demand_of("mebp"), sizes, 1_000_000_000, 0)
    return msgspec.structs.replace(plan, materialized_layers=layers)


def session_of(bundle: Bundle, plan: Plan) -> Session:
    session = Session(bundle, plan, Weights(bundle), Graphs(bundle))
    session.materialize()
    return session


def order(lowered: LoweredModel) -> list[Any]:
    """The instructions of all blocks, but for the tokens that run at once."""

    def plain(schedule: Sequence[Instruction]) -> list[Any]:
        return [
            (replace(one, body=None), None if one.body is None else plain(one.body.instructions))
            for one in schedule
        ]

    return [
        (one.block, one.adapted, one.kept, one.head, *map(plain, schedules))
        for one in lowered.blocks
        for schedules in [(one.forward, one.keeping, one.backward, one.backward_kept)]
    ]


@pytest.mark.parametrize("most_tokens", [WHOLE, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shorter_bucket_goes_the_same_way(
    tiny: Tiny, rng: Rng, family: str, most_tokens: int
) -> None:
    bundle = tiny(family, seq_lens=(*BUCKETS, *LENGTHS))
    plan = planned(bundle, 128, most_tokens)
    session = session_of(bundle, plan)
    longest = session.model(128)
    assert longest.bucket == 128 and longest.lowered.is_tiled == (most_tokens == 64)
    peaks = {}
    for bucket in (*BUCKETS, *LENGTHS):
        model = session.model(bucket)
        assert model.bucket == bucket and session.model(bucket - 1) is model
        assert model.lowered == lower(bundle.manifest, bucket, plan.sizes, packed=False)
        assert model.graphs is longest.graphs and model.materialized is longest.materialized
        if model.lowered.is_tiled == longest.lowered.is_tiled:
            assert order(model.lowered) == order(longest.lowered)
        peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"), "float32")
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


def test_a_shorter_bucket_that_tiles_do_not_divide_is_not_used(tiny: Tiny) -> None:
    """It would take more tokens at once than was planned for."""
    bundle = tiny("llama", seq_lens=(32, 67, 128))
    tiled = session_of(bundle, planned(bundle, 128, 64))
    found = [tiled.model(length).bucket for length in (20, 32, 33, 67, 68)]
    assert found == [32, 32, 128, 128, 128]
    alone = session_of(bundle, planned(bundle, 32))
    assert [alone.model(length).bucket for length in (20, 67, 100)] == [32, 67, 128]
