"""MeZO: true directional derivatives, noise, what is skipped, and its refusals.

That its steps are the monolithic algorithm's, bit for bit, is in `test_every_plan`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.bundles import Rng, Tiny
from support.estimators import copy_of, mezo_of, rows_of
from support.models import adapters_of, mebp, model_of

from runtime.core.errors import DivergedError, UsageError
from runtime.engine.model import Model
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.zeroth.zeroth_order import MOST_UNMOVED


def test_a_deferred_update_is_the_update(tiny: Tiny, rng: Rng, seed: int, tmp_path: Path) -> None:
    bundle = tiny("gemma3")
    model, start = model_of(bundle, 16), adapters_of(bundle, rng)
    rows = rows_of(bundle, rng, 1)
    found = []
    for deferred in (True, False):
        adapters = copy_of(start)
        method = mezo_of(model, adapters, tmp_path, seed, 1)
        for step in range(4):
            method.step(step, 0.1, [rows])
            if not deferred:
                method.settle()
        method.settle()
        found.append(adapters.tensors)
    assert all(mx.array_equal(found[0][name], found[1][name]) for name in found[0])


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


def gradient_of(
    model: Model, adapters: Adapters, rows: list[Row], folder: Path
) -> dict[str, np.ndarray]:
    _, gradients = mebp(model, adapters, rows, folder)
    return {name: np.array(gradient) for name, gradient in gradients.items()}


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
    gradient = gradient_of(model, adapters, rows, tmp_path)
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


@pytest.mark.slow  # of what follows from projected gradients, see above, and noise, see below
@pytest.mark.parametrize("count", [8000])
def test_the_mean_estimate_points_along_the_gradient(
    tiny: Tiny, rng: Rng, seed: int, count: int, tmp_path: Path
) -> None:
    """The mean of g z over n directions is u times the gradient, and noise at right angles to it.

    With g = b.z, u is a mean of n squared normal values, and the noise's squared length is u |b|^2
    times a sum of d - 1 such squares over n. Each is held to six standard deviations.
    """
    bundle = tiny("llama", lora_rank=1, lora_targets="o_proj")
    model, adapters = (
        model_of(bundle, 16, tile_values=1 << 20, chunk_rows=1000),
        adapters_of(bundle, rng),
    )
    rows = rows_of(bundle, rng, 1)
    gradient = gradient_of(model, adapters, rows, tmp_path)
    total = {name: np.zeros_like(g) for name, g in gradient.items()}
    queries = 50
    method = mezo_of(model, adapters, tmp_path, seed, 1, queries=queries, lanes=16)
    for step in range(count // queries):
        result = method.step(step, 1e-12, [rows])
        assert result.record is not None
        for query, g in enumerate(result.record[1]):
            for name, value in total.items():
                value += g / count * np.array(method.noise.draw(step, query, name, value.shape))
    a = np.concatenate([value.ravel() for value in total.values()])
    b = np.concatenate([gradient[name].ravel() for name in total])
    u = a @ b / (b @ b)
    assert abs(u - 1) < 6 * np.sqrt(2 / count), u
    squares = count * (a @ a / (b @ b) - u**2) / u
    others = len(b) - 1
    assert abs(squares - others) < 6 * np.sqrt(2 * others), (squares, others)


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
