"""Zeroth-order estimators: bit for bit their papers' equations on whole adapters; their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracles import estimators
from oracles.estimators import Monolithic
from oracles.whole_model import plain_loss
from support.bundles import Rng, Tiny
from support.estimators import config_of, copy_of, rows_of, same, started
from support.models import adapters_of, model_of

from runtime.config.train import TrainConfig
from runtime.core.errors import BundleError, UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.log import read_log, rebuild
from runtime.methods.protocol import method as implementation
from runtime.run.budget import training

ORACLES: dict[str, type[Monolithic]] = {
    "fzoo": estimators.MonolithicFZOO,
    "momentum": estimators.MonolithicMomentum,
    "adam": estimators.MonolithicAdam,
    "kzoo": estimators.MonolithicKZOO,
    "one-point": estimators.MonolithicResidual,
    "hizoo": estimators.MonolithicHiZOO,
    "zo-act": estimators.MonolithicZOAct,
    "parameter-norm": estimators.MonolithicParameterNorm,
    "gradient-norm": estimators.MonolithicGradientNorm,
}

RATES = {"fzoo": 1e-6, "one-point": 1e-5, "adam": 1e-3}  # where 1e-2 is far too large

LEARNING = {  # rate and steps in which the loss of a row must fall
    "fzoo": (1e-5, 16),
    "momentum": (6e-4, 30),
    "adam": (5e-3, 15),
    "kzoo": (1e-3, 20),
    "one-point": (2e-4, 30),
    "hizoo": (1e-3, 20),
    "zo-act": (1e-3, 20),
    "parameter-norm": (1e-3, 20),
    "gradient-norm": (1e-3, 20),
}
NEW_ADAPTERS = {"zo-act"}  # with which it begins
TILES = {"tile_values": 20_000, "chunk_rows": 200}  # larger: both sides have the same
STEADIER = {"one-point": {"queries": 8}}  # two directions are too noisy for few steps


@pytest.mark.parametrize("case", [*ORACLES])
def test_steps_are_the_papers_equations_and_replay_from_their_log(
    tiny: Tiny, rng: Rng, seed: int, case: str, tmp_path: Path
) -> None:
    """Also where a step is skipped, and where the state goes through a save."""
    bundle = tiny("qwen3")
    model, adapters = model_of(bundle, 16, **TILES), adapters_of(bundle, rng)
    if case in NEW_ADAPTERS:
        adapters = Adapters.initial(bundle.manifest, seed)
    config = config_of(case, seed, weight_decay=float(rng.choice([0.0, 0.1])))
    lanes = int(rng.integers(2, 9))
    method = started(config, model, adapters, tmp_path, 2, lanes)
    initial = copy_of(adapters)
    oracle = ORACLES[case](copy_of(adapters), seed, config.epsilon, config.weight_decay)
    lines = [method.log_header()]
    for step in range(4):
        rows = rows_of(bundle, rng, 2)
        rate = RATES.get(case, 1e-2) * float(rng.uniform(0.5, 2))
        if step == 1:  # its loss is not finite
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
        if step == 2:  # a save, and another process
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
    told: list[int] = []
    rebuilt = rebuild(
        *read_log(tmp_path / "log"), initial, lambda work, done, total: told.append(done - total)
    )
    same(adapters, rebuilt)
    assert told == list(range(1 - len(told), 1)) != []


@pytest.mark.slow  # the steps of all are those of the papers, see above
@pytest.mark.parametrize("case", [*ORACLES])
def test_it_learns_a_row(tiny: Tiny, case: str, tmp_path: Path) -> None:
    """Of a fixed case: no estimate from few directions lowers every loss within so few steps."""
    bundle, seed = tiny("qwen2"), 1
    rng = np.random.default_rng(seed)
    model, adapters = model_of(bundle, 16, **TILES), adapters_of(bundle, rng)
    if case in NEW_ADAPTERS:
        adapters = Adapters.initial(bundle.manifest, seed)
    rate, steps = LEARNING[case]
    rows = rows_of(bundle, rng, 1)
    before = plain_loss(model, adapters, rows)
    config = config_of(case, seed, **STEADIER.get(case, {}))
    method = started(config, model, adapters, tmp_path, len(rows), 8)
    for step in range(steps):
        method.step(step, rate, [rows])
    method.settle()
    assert plain_loss(model, adapters, rows) < 0.998 * before


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
        ({"method": "hizoo", "queries": 2}, 5, 5, 5),
        ({"method": "hizoo", "queries": 99}, 199, 21, 5),
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
    assert demand.moments == (config.method == "hizoo")


@pytest.mark.parametrize("method", ["mezo", *ORACLES])
def test_what_needs_gradients_is_refused(tiny: Tiny, seed: int, method: str) -> None:
    for option, value in (("max_grad_norm", 1.0), ("lora_dropout", 0.1)):
        config = config_of(method, seed, **{option: value})
        with pytest.raises(UsageError, match=f"{value:g}: {config.method} .*leave it out, "):
            training(config, tiny("qwen2").manifest)


@pytest.mark.parametrize("case", ["mezo", *ORACLES])
def test_a_damaged_state_is_refused(tiny: Tiny, seed: int, case: str, tmp_path: Path) -> None:
    bundle = tiny("qwen2")
    config = config_of(case, seed)
    adapters = Adapters.initial(bundle.manifest, seed)
    method = started(config, model_of(bundle, 16, **TILES), adapters, tmp_path, 1, 4)
    state = tmp_path / "state"
    method.write(state)
    whole = state.read_bytes()
    for damaged in (b"", b"[]", b"{}", whole.replace(b"0", b"[]", 1), whole[:-1], whole + b"\n0"):
        state.write_bytes(damaged)
        with pytest.raises(BundleError, match="is damaged"):
            method.read(state)
