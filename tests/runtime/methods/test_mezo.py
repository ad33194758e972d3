"""MeZO: true directional derivatives, noise, what is skipped, and its refusals.

That its steps are the monolithic algorithm's, bit for bit, is in `test_every_plan`: updates that
are deferred to the next step as well, and which number belongs to which direction.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.bundles import Rng, Tiny
from support.estimators import mezo_of, rows_of
from support.models import adapters_of, mebp, model_of

from runtime.core.errors import DivergedError, UsageError
from runtime.methods.noise import Noise
from runtime.methods.zeroth.zeroth_order import MOST_UNMOVED


def test_an_epsilon_that_changes_no_loss_ends_the_run(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    method = replace(mezo_of(model, adapters, tmp_path, seed, 1), epsilon=1e-30)
    rows = rows_of(bundle, rng, 1)
    for step in range(MOST_UNMOVED - 1):
        assert method.step(step, 0.1, [rows]).record == [0.1, [0.0]]
    with pytest.raises(UsageError, match=r"10 steps in a row .* were equal.* --epsilon 1e-30"):
        method.step(MOST_UNMOVED, 0.1, [rows])


def test_a_model_that_is_lost_is_told_to_learn_slower(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    """A large loss of which no perturbation changes a bit says nothing of epsilon."""
    bundle = tiny("qwen2")
    method = mezo_of(model_of(bundle, 16), adapters_of(bundle, rng), tmp_path, seed, 1)
    points = method.estimator.points
    with pytest.raises(DivergedError, match=r"equal.* 88 and 88, where .* lower --learning-rate$"):
        for _ in range(MOST_UNMOVED):
            method._check_moved(dict.fromkeys(points, 88.0))


def test_projected_gradients_are_directional_derivatives(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    """Within 1 % over 20 directions, at an epsilon that float32 bears.

    A direction nearly at right angles to the gradient has next to no derivative; it is held to 1 %
    of a fifth of the gradient's length.
    """
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    rows = rows_of(bundle, rng, 2)
    gradient = {n: np.array(g) for n, g in mebp(model, adapters, rows, tmp_path)[1].items()}
    length = float(np.sqrt(sum(np.square(g).sum() for g in gradient.values())))
    errors = []
    for direction in range(20):
        noise = Noise(seed + direction)
        method = replace(mezo_of(model, adapters, tmp_path, 0, 2), noise=noise, epsilon=5e-4)
        result = method.step(0, 1e-9, [rows])
        assert result.record is not None
        expected = sum(
            float((np.array(noise.draw(0, 0, name, g.shape)) * g).sum())
            for name, g in gradient.items()
        )
        error = abs(result.record[1][0] - expected)
        errors.append(error / abs(expected))
        assert error <= 0.01 * max(abs(expected), length / 5), (direction, expected, error)
    assert np.median(errors) <= 2e-3


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_noise_is_a_value_of_unit_variance(seed: int, kind: str) -> None:
    noise = Noise(seed, kind)
    z = np.array(noise.draw(3, 1, "a", (200, 300)))
    assert abs(z.mean()) < 0.02 and z.std() == pytest.approx(1, abs=0.02)
    assert np.array_equal(z, np.array(noise.draw(3, 1, "a", (200, 300))))
    if kind == "rademacher":
        assert set(np.unique(z)) == {-1.0, 1.0}
    others = [noise.draw(4, 1, "a", z.shape), noise.draw(3, 0, "a", z.shape)]
    others += [noise.draw(3, 1, "b", z.shape), Noise(seed + 1, kind).draw(3, 1, "a", z.shape)]
    for other in others:
        assert abs(np.corrcoef(z.ravel(), np.array(other).ravel())[0, 1]) < 0.03


def test_losses_that_are_not_finite_are_skipped_and_counted(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen3")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    method = mezo_of(model, adapters, tmp_path, seed, 1)
    rows = rows_of(bundle, rng, 1)
    name = next(iter(adapters.tensors))
    sound = adapters.tensors[name]
    before = dict(adapters.tensors)
    adapters.tensors[name] = sound * mx.inf
    assert method.step(0, 0.1, [rows]).skipped == 1
    result = method.step(1, 0.1, [rows])
    assert (result.skipped, result.record) == (2, [0.1, None])
    method.settle()
    adapters.tensors[name] = sound
    assert all(mx.array_equal(before[key], value) for key, value in adapters.tensors.items())
    method.write(tmp_path / "state")
    other = replace(method, skipped=0)
    other.read(tmp_path / "state")
    assert other.skipped == 2
    assert method.step(2, 0.1, [rows]).skipped == 0
