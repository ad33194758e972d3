"""Zeroth-order estimators: bit for bit their papers' equations on whole adapters; their states."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models import adapters_of, model_of, row_of
from support.plans import LINUX, demand_of

from harness.oracles import estimators
from harness.oracles.estimators import Monolithic
from harness.oracles.reference import plain_loss
from ondevice.bundle.store import Bundle
from ondevice.config.train import TrainConfig
from ondevice.errors import BundleError, DivergedError, UsageError
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.methods.cone import ConeDescent
from runtime.methods.descent import descent_of
from runtime.methods.hessian import HessianDescent
from runtime.methods.layer_scales import ScaledDescent
from runtime.methods.muon import msign
from runtime.methods.noise import Noise
from runtime.methods.protocol import Row, Start
from runtime.methods.registry import method as implementation
from runtime.methods.scalar_update import Update
from runtime.methods.trajectory import Header, digest, read_log, rebuild
from runtime.methods.zeroth_order import ZerothOrder
from runtime.planner.plan import Planner, Request

Tiny = Callable[..., Bundle]
Rng = np.random.Generator

ORACLES: dict[str, type[Monolithic]] = {
    "fzoo": estimators.MonolithicFZOO,
    "momentum": estimators.MonolithicMomentum,
    "adam": estimators.MonolithicAdam,
    "kzoo": estimators.MonolithicKZOO,
    "one-point": estimators.MonolithicResidual,
    "meazo": estimators.MonolithicMEAZO,
    "lozo": estimators.MonolithicLOZO,
    "hizoo": estimators.MonolithicHiZOO,
    "conmezo": estimators.MonolithicConMeZO,
    "grzo": estimators.MonolithicGRZO,
    "zo-act": estimators.MonolithicZOAct,
    "zo-muon": estimators.MonolithicZOMuon,
    "parameter-norm": estimators.MonolithicParameterNorm,
    "gradient-norm": estimators.MonolithicGradientNorm,
}
AVERAGED = {"method": "mezo", "queries": 2, "zo_window": 4}
OPTIONS: dict[str, dict[str, Any]] = {  # of the command line, by name of a case
    "fzoo": {"queries": 4},
    "kzoo": {"seed_pool": 16},
    "one-point": {"queries": 2},
    "meazo": {"queries": 2},
    "lozo": {"lozo_rank": 2, "lozo_interval": 3},
    "hizoo": {"queries": 2, "hessian_smoothing": 1e-3},
    "conmezo": {"queries": 2, "cone_angle": 1.2, "cone_decay": 0.9},
    "zo-act": {"queries": 2},
    "zo-muon": {"queries": 2, "muon_rank": 3, "muon_interval": 2},
    "momentum": {**AVERAGED, "zo_optimizer": "momentum"},
    "adam": {**AVERAGED, "zo_optimizer": "adam"},
    "parameter-norm": {
        **{"method": "mezo", "queries": 2},
        **{"zo_scaling": "parameter-norm", "zo_scaling_interval": 2},
    },
    "gradient-norm": {
        **{"method": "mezo", "queries": 2},
        **{"zo_scaling": "gradient-norm", "zo_scaled": "expectation"},
    },
}
RATES = {"fzoo": 1e-6, "grzo": 1e-6, "one-point": 1e-5, "adam": 1e-3}  # where 1e-2 is far too large

LEARNING = {  # rate and steps in which the loss of a row must fall
    "fzoo": (1e-5, 16),
    "momentum": (6e-4, 30),
    "adam": (5e-3, 15),
    "kzoo": (1e-3, 20),
    "one-point": (2e-4, 30),
    "meazo": (3e-3, 30),
    "lozo": (6e-4, 30),
    "hizoo": (1e-3, 20),
    "conmezo": (1e-3, 20),
    "grzo": (1e-5, 20),
    "zo-act": (1e-3, 20),
    "zo-muon": (2e-2, 30),
    "parameter-norm": (1e-3, 20),
    "gradient-norm": (1e-3, 20),
}
NEW_ADAPTERS = {"zo-act"}  # with which it begins
FEWEST_ROWS = {"grzo": 2}  # of a step
STEADIER = {"one-point": {"queries": 8}}  # two directions are too noisy for few steps


def config_of(case: str, seed: int, **more: Any) -> TrainConfig:
    options = {"method": case, "seed": seed, **OPTIONS.get(case, {}), **more}
    return TrainConfig(bundle="a bundle", data="random:0", **options)


class RandomRows:
    """Rows of a bundle's tokens, the same for the same seed."""

    def __init__(self, bundle: Bundle, seed: int) -> None:
        self.rows = rows_of(bundle, np.random.default_rng(seed), 5)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self.rows[index].tokens, self.rows[index].scored


def started(
    config: TrainConfig,
    model: Model,
    adapters: Adapters,
    folder: Path,
    rows: int,
    lanes: int,
    fresh: bool = True,
) -> ZerothOrder:
    """The method as a run starts it, but for the plan."""
    manifest = model.bundle.manifest
    config = TrainConfig(**{**vars(config), "batch_size": rows})
    demand = implementation(config.method).demand(config)
    plan: Any = SimpleNamespace(bucket=model.bucket, lanes=min(lanes, demand.lanes[0]))
    begin = Start(
        lambda length: model,
        plan,
        adapters,
        folder,
        len(manifest.blocks),
        manifest.hidden_size,
        rows=RandomRows(model.bundle, config.seed),
        fresh=fresh,
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


@pytest.mark.parametrize("case", [*ORACLES])
def test_steps_are_the_papers_equations_and_replay_from_their_log(
    tiny: Tiny, rng: Rng, seed: int, case: str, tmp_path: Path
) -> None:
    """Also where a step is skipped, and where the state goes through a save."""
    bundle = tiny("qwen3")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    if case in NEW_ADAPTERS:
        adapters = Adapters.initial(bundle.manifest, seed)
    config = config_of(case, seed, weight_decay=float(rng.choice([0.0, 0.1])))
    lanes = int(rng.integers(2, 9))
    method = started(config, model, adapters, tmp_path, 2, lanes)
    initial = copy_of(adapters)
    oracle = ORACLES[case](copy_of(adapters), seed, config.epsilon, config.weight_decay)
    lines = [method.log_header()]
    for step in range(6):
        rows = rows_of(bundle, rng, 2)
        rate = RATES.get(case, 1e-2) * float(rng.uniform(0.5, 2))
        if step == 2:  # its loss is not finite
            name = next(iter(adapters.tensors))
            method.settle()
            sound, adapters.tensors[name] = adapters.tensors[name], adapters.tensors[name] * mx.inf
            result = method.step(step, rate, [rows])
            adapters.tensors[name] = sound
            assert result.skipped == 1
        else:
            oracle.step(model, rows, step, rate)
            result = method.step(step, rate, [rows[:1], rows[1:]])
            layers = len(bundle.manifest.layers) if case == "gradient-norm" and step == 0 else 0
            assert result.forward_passes == len(method.estimator.lanes(2)) + 4 * layers
        lines.append(f"{result.record}\n".replace("None", "null"))
        if step == 3:  # a save, and another process
            method.settle()
            method.write(tmp_path / "state")
            method = started(config, model, adapters, tmp_path, 2, lanes, fresh=False)
            method.read(tmp_path / "state")
    method.settle()
    same(oracle.adapters, adapters)
    stay = {
        name for name, a in adapters.tensors.items() if mx.array_equal(initial.tensors[name], a)
    }
    frozen = {name for name in initial.tensors if name.endswith("lora_a")}
    assert stay == (frozen if case in NEW_ADAPTERS else set())
    (tmp_path / "log").write_text("".join(lines))
    same(adapters, rebuild(*read_log(tmp_path / "log"), initial))


@pytest.mark.parametrize("case", [*ORACLES])
def test_it_learns_a_row(tiny: Tiny, rng: Rng, seed: int, case: str, tmp_path: Path) -> None:
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    if case in NEW_ADAPTERS:
        adapters = Adapters.initial(bundle.manifest, seed)
    rate, steps = LEARNING[case]
    rows = rows_of(bundle, rng, 1) * FEWEST_ROWS.get(case, 1)
    before = plain_loss(model, adapters, rows)
    config = config_of(case, seed, **STEADIER.get(case, {}))
    method = started(config, model, adapters, tmp_path, len(rows), 8)
    for step in range(steps):
        method.step(step, rate, [rows])
    method.settle()
    assert plain_loss(model, adapters, rows) < 0.998 * before


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_window_of_all_estimates_is_the_optimizer(rng: Rng, seed: int, optimizer: str) -> None:
    """Then the sums are the moments that Adam keeps, with its bias correction."""
    noise, shape, steps = Noise(seed), (5, 7), 12
    descent = descent_of(optimizer, steps)
    value = start = mx.array(rng.standard_normal(shape).astype(np.float32))
    theta, m, v = np.array(start, np.float64), np.zeros(shape), np.zeros(shape)
    done = 0
    for step in range(steps):
        if step == 4:  # skipped
            continue
        done += 1
        numbers, rate = tuple(map(float, rng.standard_normal(2))), float(rng.uniform(0.01, 0.1))
        descent.remember(Update(step, rate, numbers, 0.1))
        value = descent.apply(noise, "a", value)
        z = [np.array(noise.draw(step, query, "a", shape), np.float64) for query in range(2)]
        g = (numbers[0] * z[0] + numbers[1] * z[1]) / 2
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9**done), v / (1 - 0.999**done)
        direction = m_hat / (np.sqrt(v_hat) + 1e-8) if optimizer == "adam" else m_hat
        theta = theta - rate * (direction + 0.1 * theta)
    assert np.array(value) == pytest.approx(theta, rel=1e-4, abs=1e-5)
    assert not np.allclose(theta, np.array(start), atol=1e-2)


def test_averages_keep_nothing_but_the_windows_numbers(seed: int) -> None:
    descent = descent_of("adam", 3)
    for step in (0, 1, 2, 5, 6):
        descent.remember(Update(step, 0.1, (step / 2,), 0.0))
    kept = [[2, [1.0]], [5, [2.5]], [6, [3.0]]]
    assert descent.state() == {"window": kept}
    for wrong in ([["2", [1.0]]], [[2, []]], [[2, [float("nan")]]], [2], None):
        with pytest.raises((ValueError, TypeError)):
            descent.restore({"window": wrong})


def test_a_log_of_unknown_or_odd_options_is_refused(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    log = tmp_path / "log"
    plain, averaged = (
        json.loads(
            started(
                config_of(case, seed),
                model_of(bundle, 16),
                adapters_of(bundle, rng),
                tmp_path,
                1,
                4,
            ).log_header()
        )
        for case in ("mezo", "adam")
    )
    more = {"optimizer", "window", "pool", "rank", "interval", "hessian_smoothing", "scaling"}
    assert not more & set(plain)  # as in the logs of earlier versions
    for header, lie in (
        (plain, {"optimizer": "adagrad"}), (plain, {"optimizer": "adam"}), (plain, {"window": 3}),
        (averaged, {"window": 0}), (averaged, {"window": 10**9}), (averaged, {"window": 2.0}),
        (plain, {"pool": -1}), (plain, {"pool": "16"}), (plain, {"pool": 1 << 40}),
        (plain, {"rank": 2}), (plain, {"interval": 2}), (plain, {"rank": -1, "interval": 2}),
        (plain, {"rank": 2, "interval": 3, "pool": 4}), (plain, {"rank": 1 << 40, "interval": 2}),
        (averaged, {"window": True}), (averaged, {"more": 1}),
        (averaged, {"hessian_smoothing": 0.1}), (plain, {"hessian_smoothing": 1.0}),
        (plain, {"hessian_smoothing": "1e-6"}), (plain, {"hessian_smoothing": -1e-6}),
        (plain, {"hessian_smoothing": 0.1, "trained": "full"}), (plain, {"scaling": "norm"}),
        (plain, {"frozen": "lora_b"}), (plain, {"frozen": "lora_a", "trained": "full"}),
        (plain, {"muon": True}), (plain, {"muon": 1, "rank": 2, "interval": 3}),
        (averaged, {"muon": True, "rank": 2, "interval": 3}),
        (plain, {"flipout": 1}), (plain, {"flipout": True, "pool": 3}),
        (plain, {"flipout": True, "trained": "full"}), (plain, {"scaling": "gradient-norm"}),
        (plain, {"scaled": "variance"}),
        (averaged, {"scaling": "gradient-norm", "scaled": "variance"}),
    ):  # fmt: skip
        log.write_text(json.dumps({**header, **lie}) + "\n")
        with pytest.raises(BundleError, match="not a trajectory"):
            read_log(log)
    log.write_text(json.dumps(averaged) + "\n[0.1, [1.0, 2.0]]\n")
    header_, updates = read_log(log)
    assert (header_.optimizer, header_.window) == ("adam", 4)
    assert updates == [Update(0, 0.1, (1.0, 2.0), 0.0)]
    curved = {**plain, "hessian_smoothing": 0.1}
    log.write_text(json.dumps(curved) + "\n[0.1, [1.0, 2.0], [3.0, -4.0]]\n[0.1, null]\n")
    assert read_log(log)[1] == [Update(0, 0.1, (1.0, 2.0), 0.0, (3.0, -4.0)), None]
    scaled = {**plain, "scaling": "parameter-norm", "scaled": "variance"}
    log.write_text(json.dumps(scaled) + "\n[0.1, null]\n[0.1, [1.0], [3.0]]\n[0.1, [1.0]]\n")
    assert [one and one.scales for one in read_log(log)[1]] == [None, (3.0,), ()]
    initial = Adapters.initial(bundle.manifest, seed)
    header_ = replace(read_log(log)[0], initial_sha256=digest(initial))
    with pytest.raises(BundleError, match="1 scales for"):
        rebuild(header_, read_log(log)[1], initial)
    for header, line in (
        (plain, "[0.1, [1.0], [2.0]]"), (plain, "[0.1, null, [2.0]]"), (curved, "[0.1, [1.0]]"),
        (curved, "[0.1, [1.0], [2.0, 3.0]]"), (curved, "[0.1, [1.0], [1e999]]"),
        (curved, "[0.1, [1.0], null]"), (curved, "[0.1, null, null]"),
        (scaled, "[0.1, [1.0]]"), (scaled, "[0.1, [1.0], []]"), (scaled, "[0.1, [1.0], [0.0]]"),
        (scaled, "[0.1, [1.0], [1e999]]"), (scaled, "[0.1, [1.0], ['a']]".replace("'", '"')),
        (scaled, "[0.1, [1.0], [2.0], [2.0]]"), (scaled, "[0.1, null]\n[0.1, [1.0]]"),
    ):  # fmt: skip
        log.write_text(f"{json.dumps(header)}\n{line}\n")
        with pytest.raises(BundleError, match="not a trajectory"):
            read_log(log)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "fzoo", "zo_optimizer": "adam"}, "zo_optimizer is an option of mezo, not of"),
        ({"method": "mebp", "zo_window": 3}, "zo_window is an option of mezo, not of mebp"),
        ({"method": "fzoo", "lozo_rank": 3}, "lozo_rank is an option of lozo, not of fzoo"),
        ({"method": "kzoo", "lozo_interval": 3}, "lozo_interval is an option of lozo, not of"),
        ({"method": "mezo", "seed_pool": 3}, "seed_pool is an option of kzoo, not of mezo"),
        ({"method": "mezo", "hessian_smoothing": 1e-6}, "hessian_smoothing is an option of hizoo"),
        ({"method": "hizoo", "hessian_smoothing": 0.0}, "must be above 0 and below 1"),
        ({"method": "hizoo", "hessian_smoothing": 1.0}, "must be above 0 and below 1"),
        ({"method": "mezo", "muon_rank": 3}, "muon_rank is an option of zo-muon, not of mezo"),
        ({"method": "lozo", "muon_interval": 3}, "muon_interval is an option of zo-muon"),
        ({"method": "hizoo", "zo_optimizer": "adam"}, "zo_optimizer is an option of mezo"),
        ({"method": "mebp", "queries": 2}, "queries is an option of mezo, fzoo"),
        ({"method": "mebp", "noise": "gaussian"}, "noise is an option of mezo, fzoo"),
        ({"method": "mebp", "epsilon": 0.1}, "epsilon is an option of mezo, fzoo"),
        ({"method": "conmezo", "cone_angle": 1.6}, "must be above 0 and at most pi/2"),
        ({"method": "conmezo", "cone_decay": 1.0}, "must be from 0 to below 1"),
        ({"method": "mezo", "cone_angle": 1.0}, "cone_angle is an option of conmezo"),
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


@pytest.mark.parametrize(
    ("options", "states", "copies", "scratch"),
    [
        ({"method": "mezo", "queries": 2}, 4, 4, 3),
        ({"method": "mezo", "queries": 99}, 198, 20, 3),
        ({"method": "mezo", "zo_optimizer": "adam"}, 2, 2, 6),
        ({"method": "mezo", "zo_scaling": "gradient-norm"}, 2, 2, 4),
        ({"method": "fzoo"}, 9, 9, 3),
        ({"method": "fzoo", "queries": 64}, 65, 20, 3),
        ({"method": "kzoo"}, 8, 8, 3),
        ({"method": "one-point", "queries": 3}, 3, 3, 3),
        ({"method": "one-point", "queries": 99}, 99, 18, 3),
        ({"method": "hizoo", "queries": 2}, 5, 5, 4),
        ({"method": "hizoo", "queries": 99}, 199, 21, 4),
        ({"method": "conmezo", "queries": 2}, 4, 4, 5),
        ({"method": "zo-muon", "queries": 2}, 3, 3, 6),
    ],
)
def test_demand_counts_points_and_what_an_update_takes(
    options: dict[str, Any], states: int, copies: int, scratch: int
) -> None:
    config = TrainConfig(bundle="a bundle", data="random:0", batch_size=5, **options)
    demand = implementation(config.method).demand(config)
    assert demand.hidden_states == 5 * states and demand.slots == 1 and not demand.backward
    assert (demand.adapter_copies, demand.scratch_copies) == (copies, scratch)
    assert demand.lanes[0] == min(16, 5 * states)
    assert demand.moments == (config.method in ("hizoo", "conmezo"))


def test_grzo_needs_two_rows(seed: int) -> None:
    with pytest.raises(UsageError, match="--batch-size 1 is too small for grzo"):
        implementation("grzo").demand(config_of("grzo", seed))
    assert implementation("grzo").demand(config_of("grzo", seed, grad_accumulation=2)).lanes
    with pytest.raises(UsageError, match="queries is an option of mezo"):
        config_of("grzo", seed, queries=2)


def test_directions_of_rows_share_their_noise_up_to_signs(seed: int) -> None:
    noise, shape = Noise(seed, flipout=True), (200, 50)
    z = [np.array(noise.draw(step, query, "a", shape)) for step, query in ((0, 0), (0, 1), (1, 0))]
    assert np.array_equal(abs(z[0]), abs(z[1])) and not np.array_equal(abs(z[0]), abs(z[2]))
    signs = np.sign(z[0]) * np.sign(z[1])
    assert np.linalg.matrix_rank(signs) == 1
    assert abs(np.corrcoef(z[0].ravel(), z[1].ravel())[0, 1]) < 0.1


def test_grzo_weighs_rows_by_their_differences_over_the_deviation(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    """Whatever the losses' scale; a step of one row, or of equal differences, learns nothing."""
    bundle = tiny("llama")
    method = started(config_of("grzo", seed), model_of(bundle, 16), adapters_of(bundle, rng),
                     tmp_path, 4, 4)  # fmt: skip
    drawn = rng.uniform(1, 9, 8)
    found = []
    for scale in (1.0, 1e-3):
        points = dict(zip(method.estimator.points, map(float, 5 + drawn * scale), strict=True))
        found.append(np.array(method.estimator.gradients(points, 1e-3)))
        assert np.std(found[-1]) * 2e-3 == pytest.approx(1, rel=1e-3)
        lone = {point: loss for point, loss in points.items() if point.query == 0}
        assert method.estimator.gradients(lone, 1e-3) == (0.0,)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (6, 6)])
def test_singular_values_become_about_one(rng: Rng, shape: tuple[int, int]) -> None:
    left, right = (np.linalg.qr(rng.standard_normal((n, min(shape))))[0] for n in shape)
    values = rng.uniform(0.05, 1, min(shape))
    found = np.array(msign(mx.array((left * values @ right.T).astype(np.float32))), np.float64)
    inside = left.T @ found @ right
    assert inside == pytest.approx(np.diag(np.diag(inside)), abs=1e-3)
    assert np.diag(inside).min() > 0.6 and np.diag(inside).max() < 1.3
    assert not np.array(msign(mx.zeros(shape))).any()


def test_directions_of_muon_stay_in_a_subspace(seed: int) -> None:
    noise = Noise(seed, rank=3, interval=2, orthonormal=True)
    drawn = [np.array(noise.draw(step, q, "a", (40, 9))) for step in (0, 1) for q in (0, 1)]
    assert np.linalg.matrix_rank(np.hstack(drawn), tol=1e-4) == 3
    later = np.array(noise.draw(2, 0, "a", (40, 9)))
    assert np.linalg.matrix_rank(np.hstack([drawn[0], later]), tol=1e-4) == 6
    p = np.array(noise.subspace(0, "a", (40, 2)), np.float64)
    assert p.shape == (40, 2) and p.T @ p == pytest.approx(np.eye(2), abs=1e-6)


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
    rows = FEWEST_ROWS.get(case, 1)
    adapters = Adapters.initial(bundle.manifest, seed)
    method = started(config, model_of(bundle, 16), adapters, tmp_path, rows, 4)
    state = tmp_path / "state"
    method.write(state)
    whole = state.read_bytes()
    for damaged in (b"", b"[]", b"{}", whole.replace(b"0", b"[]", 1), whole[:-1], whole + b"\n0"):
        state.write_bytes(damaged)
        with pytest.raises(BundleError, match="is damaged"):
            method.read(state)


def test_a_plan_counts_the_hessian_on_the_disk(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest
    adapters = sum(4 * a * b for a, b in Adapters.shapes(manifest).values())
    state = 32 * manifest.hidden_size * 4  # the one at theta
    mezo, hizoo = (
        Planner(manifest, LINUX).plan(Request(32, 2), demand_of(method, 2), 10**9)
        for method in ("mezo", "hizoo")
    )
    assert hizoo.scratch_disk_bytes - mezo.scratch_disk_bytes == adapters + 2 * state


def test_all_parameters_have_no_scales(seed: int) -> None:
    config = config_of("mezo", seed, trainable="full", zo_scaling="parameter-norm")
    with pytest.raises(UsageError, match="--zo-scaling parameter-norm is not for --trainable full"):
        implementation("mezo").demand(config)


def test_a_layer_without_a_gradient_has_the_scale_1(tiny: Tiny) -> None:
    descent = ScaledDescent("gradient-norm", "variance", 0, tiny("qwen2").manifest)
    norms = [0.0] + [2.0] * (len(descent.layers) - 1)
    assert descent.scale(norms)[:2] == (1.0, 2.0)
    for wrong in ([0.0] * len(norms), norms, [math.inf] * len(norms), [1.0]):
        with pytest.raises(ValueError, match="scale"):
            descent.restore({"scales": wrong, "measured": 0})


def test_all_parameters_have_no_hessian(seed: int) -> None:
    with pytest.raises(UsageError, match="--trainable full is not for hizoo"):
        implementation("hizoo").demand(config_of("hizoo", seed, trainable="full"))


def test_a_save_without_a_hessian_is_refused(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    method = started(config_of("hizoo", seed), model, adapters, tmp_path, 1, 4)
    state = tmp_path / "state"
    method.write(state)
    whole = bytearray(state.read_bytes())
    begins = whole.index(b"\n") + 1
    assert len(whole) - begins == 4 * adapters.size
    for wrong in (0.0, -1.0, np.inf, np.nan):
        at = begins + 4 * int(rng.integers(adapters.size))
        state.write_bytes(whole[:at] + np.float32(wrong).tobytes() + whole[at + 4 :])
        with pytest.raises(BundleError, match=r"is damaged: .*curvature"):
            method.read(state)
    state.write_bytes(whole[: begins - 1])
    with pytest.raises(BundleError, match="is damaged"):
        method.read(state)


@pytest.mark.parametrize("h", [0.0, 1e30])
def test_a_hessian_beyond_float32_ends_a_run(seed: int, h: float) -> None:
    descent = HessianDescent(0.9, {"a": (3, 4)}, {})
    with pytest.raises(DivergedError, match="lower --hessian-smoothing"):
        for step in range(99):
            descent.remember(Update(step, 0.1, (1.0,), 0.0, (h,)))
            descent.apply(Noise(seed), "a", mx.zeros((3, 4)))


def test_a_save_with_another_momentum_is_refused(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path
) -> None:
    bundle = tiny("qwen2")
    model, adapters = model_of(bundle, 16), adapters_of(bundle, rng)
    method = started(config_of("conmezo", seed), model, adapters, tmp_path, 1, 4)
    method.step(0, 1e-3, [rows_of(bundle, rng, 1)])
    state = tmp_path / "state"
    method.write(state)
    method.read(state)
    whole = state.read_bytes()
    begins = whole.index(b"\n") + 1
    assert len(whole) - begins == 4 * adapters.size
    for wrong in (1e9, np.inf, np.nan):
        at = begins + 4 * int(rng.integers(adapters.size))
        state.write_bytes(whole[:at] + np.float32(wrong).tobytes() + whole[at + 4 :])
        with pytest.raises(BundleError, match=r"is damaged: .*momentum"):
            method.read(state)


def test_directions_lie_at_the_cones_angle(seed: int) -> None:
    """Their length is about that of the noise; at a right angle they are the noise."""
    shapes = {"a": (300, 40), "b": (50, 80)}
    noise, angle = Noise(seed), 1.0
    narrow, wide = (ConeDescent(one, 0.9, shapes, {}) for one in (angle, math.pi / 2))
    for descent in (narrow, wide):
        descent.remember(Update(0, 0.1, (2.0,), 0.0))
        for name, shape in shapes.items():
            descent.apply(noise, name, mx.zeros(shape))
    momentum = {name: noise.draw(0, 0, name, shape) for name, shape in shapes.items()}
    fresh = {name: noise.draw(1, 0, name, shape) for name, shape in shapes.items()}
    a, m = (
        np.concatenate([np.array(part(name)).ravel() for name in shapes])
        for part in (lambda name: narrow.direction(name, fresh[name]), momentum.__getitem__)
    )
    cosine = a @ m / np.linalg.norm(a) / np.linalg.norm(m)
    assert cosine == pytest.approx(math.cos(angle), abs=0.03)
    assert np.linalg.norm(a) == pytest.approx(math.sqrt(a.size), rel=0.05)
    for name in shapes:
        assert mx.allclose(wide.direction(name, fresh[name]), fresh[name], atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cone_angle": 1.6, "cone_decay": 0.9},
        {"cone_angle": 1.0, "cone_decay": 1.0},
        {"cone_angle": 0.0, "cone_decay": 0.9},
        {"cone_angle": "1", "cone_decay": 0.9},
        {"cone_angle": 1.0, "cone_decay": 0.9, "trained": "full"},
        {"cone_angle": 1.0, "cone_decay": 0.9, "hessian_smoothing": 0.1},
        {"hessian_smoothing": 1.0},
    ],
)
def test_a_log_with_impossible_momentum_or_hessian_is_refused(wrong: dict[str, Any]) -> None:
    good = Header(1, "gaussian", 0.0, "", "", cone_angle=1.0, cone_decay=0.9)
    good.check()
    with pytest.raises(ValueError, match=r"its cone|a cone|its smoothing"):
        Header(**{"seed": 1, "noise": "gaussian", "weight_decay": 0.0, "weights_sha256": "",
                  "initial_sha256": "", **wrong}).check()  # fmt: skip
