"""A new loss is one file and one line: methods take it, also where it compares pairs of rows."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.estimators import mezo_of, perturbed
from support.models import adapters_of, mebp, mebp_of, model_of, rows_of
from support.pair_loss import PairLoss, pair_loss, pair_slope

from runtime.bundle.store import Bundle
from runtime.config.methods import OBJECTIVES, Entry
from runtime.core.errors import UsageError
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.methods.optimizer import Optimizer
from runtime.objectives.objective import Loss, loss_of, objective_of

EPSILON = 0.02
LENGTHS = (31, 20, 27, 9)  # two pairs


def summed_loss(bundle: Bundle, adapters: Adapters, row: Row) -> float:
    """A row's cross entropy, by the whole model in memory."""
    return reference.plain_loss(model_of(bundle, 32), adapters, [row]) * len(row.targets)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a loss that is registered."""
    monkeypatch.setitem(OBJECTIVES, "half", Entry("support.half_loss", "half the loss"))
    return "half"


def test_half_the_loss_has_half_the_gradients(
    tiny: Tiny, rng: Rng, tmp_path: Path, half: str
) -> None:
    bundle = tiny("qwen2")
    model, adapters, rows = model_of(bundle, 32), adapters_of(bundle, rng), rows_of(bundle, rng)
    loss, whole = mebp(model, adapters, rows, tmp_path)
    found, halves = mebp(model, adapters, rows, tmp_path, loss=loss_of(half, None, "mebp"))
    assert found.loss_sum == loss.loss_sum == loss.objective_sum == 2 * found.objective_sum
    assert halves.keys() == whole.keys()
    for name, gradient in whole.items():
        assert mx.abs(gradient).max().item() > 0
        np.testing.assert_allclose(np.array(halves[name]), np.array(gradient) / 2, rtol=1e-6)


def test_backpropagation_trains_with_it(tiny: Tiny, rng: Rng, tmp_path: Path, half: str) -> None:
    """Plain gradient descent at twice the rate goes where the whole loss goes."""
    bundle = tiny("qwen2")
    model, rows = model_of(bundle, 32), rows_of(bundle, rng)
    seed, trained = int(rng.integers(1 << 30)), []
    for name, rate in (("loss", 0.1), (half, 0.2)):
        adapters = Adapters.initial(bundle.manifest, seed)
        optimizer, loss = Optimizer(adapters, "sgd", 0.0, tmp_path), loss_of(name, None, "mebp")
        running = mebp_of(model, adapters, optimizer, tmp_path, len(rows), loss=loss)
        results = [running.step(step, rate, [rows]) for step in range(3)]
        assert results[-1].loss.loss_sum < results[0].loss.loss_sum
        trained.append((results, adapters.tensors))
    (results, whole), (halves, same) = trained
    for one, other in zip(results, halves, strict=True):
        mean = other.loss.loss_sum / other.loss.scored_tokens
        assert one.shown == {} and other.shown == {"trained_loss": pytest.approx(mean / 2)}
    for name, value in whole.items():
        np.testing.assert_allclose(np.array(same[name]), np.array(value), rtol=1e-4, atol=1e-7)


def test_a_loss_sees_pairs_of_rows(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    """The gradients are those of the rows by themselves, weighted by the slopes of their pairs."""
    bundle = tiny("llama")
    model, adapters = model_of(bundle, 32), adapters_of(bundle, rng)
    rows = rows_of(bundle, rng, LENGTHS)
    by_row = [mebp(model, adapters, [row], tmp_path) for row in rows]
    sums = [loss.loss_sum for loss, _ in by_row]
    found, gradients = mebp(model, adapters, rows, tmp_path, loss=PairLoss())
    pairs = ((sums[0], sums[1]), (sums[2], sums[3]))
    assert found.objective_sum == pytest.approx(sum(pair_loss(*pair) for pair in pairs))
    assert found.loss_sum == pytest.approx(sum(sums))
    slopes = [sign * pair_slope(*pair) for pair in pairs for sign in (1, -1)]
    for name, gradient in gradients.items():
        expected = sum(
            np.array(of_row[name], np.float64) * len(row.targets) * slope / len(pairs)
            for (_, of_row), row, slope in zip(by_row, rows, slopes, strict=True)
        )
        np.testing.assert_allclose(np.array(gradient), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_forward_passes_see_pairs_of_rows(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path, lanes: int
) -> None:
    """Both rows of a pair are seen at one point, however many lanes visit the head together."""
    bundle = tiny("llama")
    model, adapters = model_of(bundle, 32), adapters_of(bundle, rng)
    rows = rows_of(bundle, rng, LENGTHS)
    more = {"epsilon": EPSILON, "lanes": lanes, "objective": PairLoss()}
    running = mezo_of(model, adapters, tmp_path, seed, len(rows), **more)
    means = []
    for by in (EPSILON, -EPSILON):
        there = perturbed(running, adapters, by)
        sums = [summed_loss(bundle, there, row) for row in rows]
        means.append((pair_loss(*sums[:2]) + pair_loss(*sums[2:])) / 2)
    result = running.step(0, 0.1, [rows])
    assert result.record is not None
    slope = (means[0] - means[1]) / (2 * EPSILON)
    assert result.record[1] == pytest.approx([slope], rel=1e-2, abs=1e-3)
    assert result.shown == {"trained_loss": pytest.approx(sum(means) / 2, rel=1e-4)}


def test_a_share_has_no_gradient() -> None:
    assert not isinstance(objective_of("exact", None), Loss)
    with pytest.raises(UsageError, match="--objective exact has no gradient, which mebp follows"):
        loss_of("exact", None, "mebp")
