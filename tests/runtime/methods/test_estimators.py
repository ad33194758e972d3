"""Zeroth-order estimators: bit for bit their papers' equations on whole adapters; their states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models import adapters_of, model_of, row_of

from harness.oracles import estimators
from harness.oracles.estimators import Monolithic
from harness.oracles.reference import plain_loss
from ondevice.bundle.store import Bundle
from ondevice.config.train import TrainConfig
from ondevice.errors import BundleError, UsageError
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Row, Start
from runtime.methods.registry import method as implementation
from runtime.methods.trajectory import read_log, rebuild
from runtime.methods.zeroth_order import ZerothOrder

Tiny = Callable[..., Bundle]
Rng = np.random.Generator

ORACLES: dict[str, type[Monolithic]] = {
    "fzoo": estimators.MonolithicFZOO,
}
OPTIONS: dict[str, dict[str, Any]] = {}  # of the command line, by name of a case
RATES = {"fzoo": 1e-6}  # large enough to change most values, where 1e-2 is far too large

LEARNING = {"fzoo": (1e-5, 20)}  # rate and steps in which the loss of a row must fall


def config_of(case: str, seed: int, **more: Any) -> TrainConfig:
    options = {"method": case, "seed": seed, **OPTIONS.get(case, {}), **more}
    return TrainConfig(bundle="a bundle", data="random:0", **options)


def started(
    config: TrainConfig, model: Model, adapters: Adapters, folder: Path, rows: int, lanes: int
) -> ZerothOrder:
    """The method as a run starts it, but for the plan."""
    manifest = model.bundle.manifest
    config = TrainConfig(**{**vars(config), "batch_size": rows})
    demand = implementation(config.method).demand(config)
    plan: Any = SimpleNamespace(bucket=model.bucket, lanes=min(lanes, demand.lanes[0]))
    begin = Start(
        lambda length: model, plan, adapters, folder, len(manifest.blocks), manifest.hidden_size
    )
    found = implementation(config.method).start(config, begin)
    assert isinstance(found, ZerothOrder)
    return found


def copy_of(adapters: Adapters) -> Adapters:
    return Adapters(adapters.manifest, dict(adapters.tensors))


def rows_of(bundle: Bundle, rng: Rng, count: int) -> list[Row]:
    return [row_of(bundle, rng, int(rng.integers(3, 16))) for _ in range(count)]


def same(a: Adapters, b: Adapters) -> None:
    for name, expected in a.tensors.items():
        assert mx.array_equal(b.tensors[name], expected), name


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
@pytest.mark.parametrize("case", [*ORACLES])
def test_steps_are_the_papers_equations_and_replay_from_their_log(
    tiny: Tiny, rng: Rng, seed: int, case: str, family: str, tmp_path: Path
) -> None:
    """Also where a step is skipped, and where the state goes through a save."""
    bundle = tiny(family)
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    initial = copy_of(adapters)
    config = config_of(case, seed, weight_decay=float(rng.choice([0.0, 0.1])))
    oracle = ORACLES[case](copy_of(adapters), seed, config.epsilon, config.weight_decay)
    lanes = int(rng.integers(2, 9))
    method = started(config, model, adapters, tmp_path, 2, lanes)
    lines = [method.log_header()]
    for step in range(9):
        rows = rows_of(bundle, rng, 2)
        rate = RATES[case] * float(rng.uniform(0.5, 2))
        if step == 3:  # its loss is not finite
            name = next(iter(adapters.tensors))
            method.settle()
            sound, adapters.tensors[name] = adapters.tensors[name], adapters.tensors[name] * mx.inf
            result = method.step(step, rate, [rows])
            adapters.tensors[name] = sound
            assert result.skipped == 1
        else:
            oracle.step(model, rows, step, rate)
            result = method.step(step, rate, [rows[:1], rows[1:]])
            assert result.forward_passes == 2 * len(method.estimator.points)
        lines.append(f"{result.record}\n".replace("None", "null"))
        if step == 5:  # a save, and another process
            method.settle()
            method.write(tmp_path / "state")
            method = started(config, model, adapters, tmp_path, 2, lanes)
            method.read(tmp_path / "state")
    method.settle()
    same(oracle.adapters, adapters)
    assert not any(mx.array_equal(initial.tensors[name], a) for name, a in adapters.tensors.items())
    (tmp_path / "log").write_text("".join(lines))
    same(adapters, rebuild(*read_log(tmp_path / "log"), initial))


@pytest.mark.parametrize("case", [*ORACLES])
def test_it_learns_a_row(tiny: Tiny, rng: Rng, seed: int, case: str, tmp_path: Path) -> None:
    bundle = tiny("gemma3")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    rate, steps = LEARNING[case]
    rows = rows_of(bundle, rng, 1)
    before = plain_loss(model, adapters, rows)
    method = started(config_of(case, seed), model, adapters, tmp_path, 1, 8)
    for step in range(steps):
        method.step(step, rate, [rows])
    method.settle()
    assert plain_loss(model, adapters, rows) < 0.97 * before


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
    assert method.estimator.gradients({at_theta: 5.0, **equal}, 1e-3) == (0.0,) * 8


def test_fzoo_needs_two_directions(seed: int) -> None:
    with pytest.raises(UsageError, match="--queries 1 is too few for fzoo"):
        implementation("fzoo").demand(config_of("fzoo", seed, queries=1))


@pytest.mark.parametrize("method", ["mezo", *ORACLES])
def test_what_needs_gradients_is_refused(seed: int, method: str) -> None:
    for option, value in (("max_grad_norm", 1.0), ("lora_dropout", 0.1)):
        config = config_of(method, seed, **{option: value})
        with pytest.raises(UsageError, match=config.method):
            implementation(config.method).demand(config)


@pytest.mark.parametrize("case", ["mezo", *ORACLES])
def test_a_damaged_state_is_refused(
    tiny: Tiny, rng: Rng, seed: int, case: str, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    config = config_of(case, seed)
    method = started(config, model_of(bundle, 16), adapters_of(bundle, rng), tmp_path, 1, 4)
    state = tmp_path / "state"
    method.write(state)
    whole = state.read_text()
    for damaged in ("", "[]", "{}", whole.replace("0", "[]", 1), whole[:-1]):
        state.write_text(damaged)
        with pytest.raises(BundleError, match="is damaged"):
            method.read(state)
