"""What follows estimates of the gradient: averages, curvature, scales."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.bundles import Rng, Tiny
from support.estimators import config_of, started
from support.models import adapters_of, model_of
from support.plans import LINUX, demand_of

from runtime.core.errors import BundleError, DivergedError
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent, Update, descent_of
from runtime.methods.zeroth.hizoo import HessianDescent
from runtime.methods.zeroth.layer_scales import ScaledDescent
from runtime.plan.plan import Request, Task
from runtime.plan.planner import Planner


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
        value = descent.apply(noise, {"a": value})["a"]
        z = [np.array(noise.draw(step, query, "a", shape), np.float64) for query in range(2)]
        g = (numbers[0] * z[0] + numbers[1] * z[1]) / 2
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9**done), v / (1 - 0.999**done)
        direction = m_hat / (np.sqrt(v_hat) + 1e-8) if optimizer == "adam" else m_hat
        theta = theta - rate * (direction + 0.1 * theta)
    assert np.array(value) == pytest.approx(theta, rel=1e-4, abs=1e-5)
    assert not np.allclose(theta, np.array(start), atol=1e-2)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "scaled", "hizoo"])
@pytest.mark.parametrize("queries", [1, 3])
def test_tensors_are_updated_together_to_the_bits_of_each_alone(
    tiny: Tiny, rng: Rng, seed: int, monkeypatch: pytest.MonkeyPatch, name: str, queries: int
) -> None:
    """In one evaluation for each direction of SGD, and within the memory that is planned."""
    manifest, noise = tiny("qwen2").manifest, Noise(seed)
    block = manifest.layers[0]
    shapes = dict.fromkeys(manifest.adapter_shapes(block), (1024, 8))
    start = {
        full: mx.array(rng.standard_normal(shape, np.float32)) for full, shape in shapes.items()
    }
    mx.eval(start)
    numbers = tuple(map(float, rng.standard_normal(queries)))
    extras = {"scaled": (0.5,) * len(manifest.layers), "hizoo": numbers}.get(name, ())

    def descent() -> Descent:
        if name == "hizoo":
            return HessianDescent(0.1, shapes, {})
        if name == "scaled":
            return ScaledDescent("parameter-norm", "variance", 0, manifest)
        return descent_of(name, 2)

    together, alone = descent(), descent()
    values, evaluations, evaluate = dict(start), 0, mx.eval

    def counted(*arrays: object) -> None:
        nonlocal evaluations
        evaluations += 1
        evaluate(*arrays)

    for step in range(2):
        update = Update(step, 0.1, numbers, 0.1, extras)
        together.remember(update)
        alone.remember(update)
        expected = {full: alone.apply(noise, {full: value})[full] for full, value in values.items()}
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", counted)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            values = together.apply(noise, values)
            peak = mx.get_peak_memory() - before
        for full, value in values.items():
            assert bytes(value) == bytes(expected[full])
    block_bytes = sum(value.nbytes for value in values.values())
    assert peak <= together.scratch_copies * block_bytes
    assert evaluations <= 2 * queries or name not in ("sgd", "scaled")


def test_averages_keep_nothing_but_the_windows_numbers() -> None:
    descent = descent_of("adam", 3)
    for step in (0, 1, 2, 5, 6):
        descent.remember(Update(step, 0.1, (step / 2,), 0.0))
    kept = [[2, [1.0]], [5, [2.5]], [6, [3.0]]]
    assert descent.state() == {"window": kept}
    for wrong in ([["2", [1.0]]], [[2, []]], [[2, [float("nan")]]], [2], None):
        with pytest.raises((ValueError, TypeError)):
            descent.restore({"window": wrong})


def test_a_plan_counts_the_hessian_on_the_disk(tiny: Tiny) -> None:
    manifest = tiny("qwen2").manifest
    adapters = sum(4 * a * b for a, b in Adapters.shapes(manifest).values())
    state = 32 * manifest.hidden_size * 4  # the one at theta
    mezo, hizoo = (
        Planner(manifest, LINUX).plan(Task(Request(32, 2), demand_of(method, 2)), 10**9)
        for method in ("mezo", "hizoo")
    )
    assert hizoo.scratch_disk_bytes - mezo.scratch_disk_bytes == adapters + 2 * state


def test_a_layer_without_a_gradient_has_the_scale_1(tiny: Tiny) -> None:
    descent = ScaledDescent("gradient-norm", "variance", 0, tiny("qwen2").manifest)
    norms = [0.0] + [2.0] * (len(descent.layers) - 1)
    assert descent.scale(norms)[:2] == (1.0, 2.0)
    for wrong in ([0.0] * len(norms), norms, [math.inf] * len(norms), [1.0]):
        with pytest.raises(ValueError, match="scale"):
            descent.restore({"scales": wrong, "measured": 0})


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
            descent.apply(Noise(seed), {"a": mx.zeros((3, 4))})
