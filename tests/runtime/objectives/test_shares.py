"""Objectives without a gradient: their values by brute force, their labels, and runs with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.estimators import ListedRows, mezo_of, perturbed
from support.models import adapters_of, model_of, scored_logits
from support.runs import adapter, metrics_of, refuses, succeeds, train_arguments

from runtime.config.methods import OBJECTIVES
from runtime.core.errors import DataError
from runtime.engine.model import Model
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.methods.adapters import Adapters
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.objectives.labels import MOST_LABELS, labels_of
from runtime.objectives.objective import objective_of

EPSILON = 0.02
SHARES = tuple(OBJECTIVES)[1:]


def share_of(name: str, model: Model, adapters: Adapters, rows: list[Row]) -> float:
    """An objective of rows, from all their logits."""
    labels = np.unique([row.targets[0] for row in rows])
    right: list[bool] = []
    for row in rows:
        logits = scored_logits(model, adapters, row.inputs, row.scored)
        tokens = logits.argmax(axis=-1) == row.targets
        if name == "labels":
            right.append(bool(labels[logits[0][labels].argmax()] == row.targets[0]))
        else:
            right += tokens.tolist() if name == "accuracy" else [bool(tokens.all())]
    return sum(right) / len(right)


def rows_of(model: Model, adapters: Adapters, rng: Rng) -> list[Row]:
    """Rows of which some are predicted right: the last target is often what the model says."""
    found = []
    for _ in range(9):
        length = int(rng.integers(3, 6))
        tokens = rng.integers(0, model.bundle.manifest.vocab_size, length + 1).astype(np.int32)
        first = length - 1 if rng.random() < 0.7 else length - 2
        scored = np.arange(first, length)
        if rng.random() < 0.6:
            tokens[-1] = scored_logits(model, adapters, tokens[:-1], scored)[-1].argmax()
        found.append(Row(tokens, scored))
    return found


def method_of(
    model: Model, adapters: Adapters, folder: Path, seed: int, name: str, samples: Sequence[Sample]
) -> ZerothOrder:
    rows = ListedRows([row for sample in samples for row in sample.rows])
    more = {"epsilon": EPSILON, "lanes": 3, "objective": objective_of(name, rows)}
    return mezo_of(model, adapters, folder, seed, len(samples), **more)


@pytest.mark.parametrize(
    ("name", "family"), [*zip(SHARES, ("gemma3", "qwen2", "llama"), strict=True)]
)
def test_numbers_are_differences_of_shares(
    tiny: Tiny, rng: Rng, seed: int, family: str, name: str, tmp_path: Path
) -> None:
    """Also of packed rows, whose answers lie one after another."""
    bundle = tiny(family)
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    rows = rows_of(model, adapters, rng)
    samples: list[Sample] = [PackedRows(tuple(rows[:3])), *rows[3:7], PackedRows(tuple(rows[7:]))]
    method = method_of(model, adapters, tmp_path, seed, name, samples)
    plus, minus = (
        share_of(name, model, perturbed(method, adapters, by), rows) for by in (EPSILON, -EPSILON)
    )
    result = method.step(0, 0.1, [samples])
    assert result.record is not None
    assert result.record[1] == pytest.approx([(minus - plus) / (2 * EPSILON)], abs=1e-9)
    share = pytest.approx((plus + minus) / 2)
    assert result.shown == {"objective": share, "learned": any(result.record[1])}
    losses = [reference.plain_loss(model, adapters, [row]) for row in rows]
    assert result.loss.scored_tokens == sum(len(row.targets) for row in rows)
    assert (
        0.2 < result.loss.loss_sum / result.loss.scored_tokens / np.mean(losses) < 5
    )  # still the loss


def test_a_share_that_stays_ends_no_run(tiny: Tiny, rng: Rng, seed: int, tmp_path: Path) -> None:
    bundle = tiny("llama")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    last = np.array([1])
    worst = scored_logits(model, adapters, np.array([3, 4]), last)[0].argmin()
    rows: list[Sample] = [Row(np.array([3, 4, worst], np.int32), last)]
    method = method_of(model, adapters, tmp_path, seed, "exact", rows)
    before = {name: np.array(value) for name, value in adapters.tensors.items()}
    for step in range(12):
        assert method.step(step, 0.1, [rows]).shown == {"objective": 0, "learned": False}
    method.settle()
    assert all(
        mx.array_equal(adapters.tensors[name], mx.array(old)) for name, old in before.items()
    )


def test_labels_are_the_first_tokens_of_answers() -> None:
    def row(*targets: int) -> Row:
        tokens = np.array([0, 1, *targets], np.int32)
        return Row(tokens, np.arange(1, 1 + len(targets)))

    asked = ("--objective labels", "training rows")
    assert labels_of(ListedRows([row(9, 2), row(5, 2), row(9, 3)]), *asked).tolist() == [5, 9]
    with pytest.raises(DataError, match="all training rows begin with the same token"):
        labels_of(ListedRows([row(9, 2), row(9, 3)]), *asked)
    many = ListedRows([row(label) for label in range(MOST_LABELS + 5)])
    with pytest.raises(DataError, match=r"first 257 training rows begin with 257 different"):
        labels_of(many, *asked)


def test_runs_with_an_objective(tiny: Tiny, tmp_path: Path) -> None:
    """Resumed and replayed to the same bytes; the share is in the metrics and on the screen."""
    bundle = tiny("qwen2", seq_lens=(16, 32)).path
    more = {"method": "fzoo", "objective": "accuracy", "queries": 3, "learning_rate": 1e-6}
    done = succeeds(*train_arguments(bundle, tmp_path / "whole", 4, **more))
    assert "% right, " in done.stderr
    entries = metrics_of(tmp_path / "whole")
    assert all(0 <= entry["objective"] <= 1 for entry in entries)
    log = (tmp_path / "whole" / "trajectory.jsonl").read_text().splitlines()[1:]
    assert [entry["learned"] for entry in entries] == [any(json.loads(x)[1]) for x in log]
    idle = sum(not entry["learned"] for entry in entries[1:])  # the first step has its own line
    assert (f"nothing learned in {idle} of 3 steps" in done.stderr) == bool(idle)
    succeeds(*train_arguments(bundle, tmp_path / "run", 2, **more))
    succeeds("train", "--resume", tmp_path / "run", "--steps", 4)
    succeeds("replay", tmp_path / "run", "-o", tmp_path / "again")
    # the schedule of the first two steps was another
    assert adapter(tmp_path / "again") == adapter(tmp_path / "run")


def test_backpropagation_has_no_such_objective(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", seq_lens=(16, 32)).path
    exact = train_arguments(bundle, tmp_path / "run", 2, method="mebp", objective="exact")
    refuses(2, "exact has no gradient, which mebp", *exact)
    labels = train_arguments(bundle, tmp_path / "run", 2, method="mezo", objective="labels")
    refuses(4, "too many to be labels", *labels)
    assert not (tmp_path / "run").exists()
