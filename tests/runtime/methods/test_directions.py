"""Directions and numbers of single methods; options that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Rng, Tiny
from support.estimators import config_of, copy_of, rows_of, started
from support.models import adapters_of, model_of

from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.protocol import method as implementation


def test_a_pool_has_so_many_directions_that_k_numbers_are_the_adapters(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    """theta = theta_0 - sum of a_j z_j, whatever the number of steps."""
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    initial = copy_of(adapters)
    method = started(config_of("kzoo", seed, seed_pool=3), model, adapters, tmp_path, 1, 8)
    a = np.zeros(3)
    for step in range(6):
        result = method.step(step, 0.01, [rows_of(bundle, rng, 1)])
        assert result.record is not None
        for query, g in enumerate(result.record[1]):
            a[method.noise.member(step, query)] += 0.01 * g / 4
    method.settle()
    assert np.count_nonzero(a) == 3
    of = {
        method.noise.member(step, query): (step, query) for step in range(6) for query in range(4)
    }
    for name, theta in initial.tensors.items():
        z = [np.array(method.noise.draw(*of[j], name, theta.shape)) for j in range(3)]
        expected = np.array(theta) - sum(a[j] * z[j] for j in range(3))
        assert np.array(adapters.tensors[name]) == pytest.approx(expected, abs=1e-5), name


def test_fzoo_divides_by_the_deviation_of_the_losses(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    """Whatever the losses' scale, the numbers are those of a standard deviation of one."""
    bundle = tiny("llama")
    method = started(config_of("fzoo", seed), model_of(bundle, 16), adapters_of(bundle, rng),
                     tmp_path, 1, 4)  # fmt: skip
    at_theta, *perturbed = method.estimator.points
    drawn = rng.uniform(1, 9, len(perturbed))
    found = []
    for scale in (1.0, 1e-3):
        losses = dict(zip(perturbed, map(float, 5 + drawn * scale), strict=True))
        numbers = np.array(method.estimator.gradients({at_theta: 5.0, **losses}, 1e-3))
        assert np.std(numbers, ddof=1) * 1e-3 == pytest.approx(1)
        found.append(numbers)
    assert found[0] == pytest.approx(found[1])
    equal = dict.fromkeys(perturbed, 4.0)
    assert method.estimator.gradients({at_theta: 5.0, **equal}, 1e-3) == (0.0,) * 4


def test_fzoo_needs_two_directions(seed: int) -> None:
    with pytest.raises(UsageError, match="--queries 1 is too few for fzoo"):
        implementation("fzoo").demand(config_of("fzoo", seed, queries=1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": "fzoo", "zo_optimizer": "adam"},
            "zo_optimizer is an option of mezo and zo-act",
        ),
        ({"method": "mebp", "zo_window": 3}, "zo_window is an option of mezo and zo-act, not"),
        ({"method": "mezo", "seed_pool": 3}, "seed_pool is an option of kzoo, not of mezo"),
        ({"method": "mezo", "hessian_smoothing": 1e-6}, "hessian_smoothing is an option of hizoo"),
        ({"method": "hizoo", "hessian_smoothing": 0.0}, "must be from 1e-12 to 0.99"),
        ({"method": "hizoo", "hessian_smoothing": 1.0}, "must be from 1e-12 to 0.99"),
        ({"method": "hizoo", "zo_optimizer": "adam"}, "zo_optimizer is an option of mezo and"),
        ({"method": "mebp", "queries": 2}, "queries is an option of mezo, fzoo"),
        ({"method": "mebp", "noise": "gaussian"}, "noise is an option of mezo, fzoo"),
        ({"method": "mebp", "epsilon": 0.1}, "epsilon is an option of mezo, fzoo"),
        ({"method": "mebp", "max_grad_norm": -1.0}, "max_grad_norm is -1"),
        ({"method": "mezo", "zo_window": 3}, "zo_window needs zo_optimizer momentum or adam"),
        ({"method": "mezo", "zo_optimizer": "adam", "zo_window": 0}, "from 1 to 1000"),
        ({"method": "fzoo", "zo_scaling": "parameter-norm"}, "zo_scaling is an option of mezo"),
        ({"method": "mezo", "zo_scaled": "expectation"}, "zo_scaled needs zo_scaling"),
        ({"method": "mezo", "zo_scaling_interval": 3}, "zo_scaling_interval needs zo_scaling"),
        (
            {"method": "mezo", "zo_scaling": "gradient-norm", "zo_optimizer": "momentum"},
            "zo_scaling is for zo_optimizer sgd, not for momentum",
        ),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainConfig(bundle="a bundle", data="random:0", **options)
