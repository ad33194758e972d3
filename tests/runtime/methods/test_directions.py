"""Directions and numbers of single methods; options that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Rng, Tiny
from support.estimators import config_of, started
from support.models import adapters_of, model_of

from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.methods.protocol import method as implementation


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
        ({"method": "mebp", "queries": 2}, "queries is an option of mezo, fzoo"),
        ({"method": "mebp", "noise": "gaussian"}, "noise is an option of mezo, fzoo"),
        ({"method": "mebp", "epsilon": 0.1}, "epsilon is an option of mezo, fzoo"),
        ({"method": "mebp", "max_grad_norm": -1.0}, "max_grad_norm is -1"),
        ({"method": "mezo", "zo_window": 3}, "zo_window needs zo_optimizer momentum or adam"),
        ({"method": "mezo", "zo_optimizer": "adam", "zo_window": 0}, "from 1 to 1000"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainConfig(bundle="a bundle", data="random:0", **options)
