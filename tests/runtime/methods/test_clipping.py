"""Gradient clipping against the dense model's gradients, clipped by MLX's own function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.lengths import at_length, pairs
from support.models import FAMILIES, Kept, adapters_of, agree, model_of, rows_of
from support.plans import LINUX, demand_of

from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import DivergedError, UsageError
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.methods.clipping import Clipping
from runtime.methods.mebp import MeBP
from runtime.plan.demand import Demand
from runtime.plan.plan import Planner, Request
from runtime.run import budget
from runtime.storage.activations import Activations

CLOSE = 1e-5


def clipping_mebp(
    bundle: Bundle, adapters: Adapters, optimizer: object, most: float, folder: Path, rows: int
) -> MeBP:
    model = model_of(bundle, 32)
    shape = (1, 32, bundle.manifest.hidden_size)
    scratch = Activations(folder, len(bundle.manifest.blocks), rows, shape)
    clipping = Clipping(adapters, most, folder)
    return MeBP(lambda length: model, adapters, scratch, optimizer, clipping=clipping)  # type: ignore[arg-type]


def flat(parts: list[list[Row]]) -> list[tuple[np.ndarray, int]]:  # type: ignore[type-arg]
    return [(row.tokens, row.scored) for part in parts for row in part]


@at_length("draws", 1, 6)
@pytest.mark.parametrize(("family", "share"), pairs(FAMILIES, (0.01, 2.0)))
def test_gradients_are_the_dense_models_clipped(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, share: float, draws: int
) -> None:
    bundle = tiny(family)
    for _ in range(draws):
        adapters = adapters_of(bundle, rng)
        parts = [rows_of(bundle, rng) for _ in range(int(rng.integers(1, 4)))]
        loss, gradients = reference.gradients(reference.dense_model(bundle, adapters), flat(parts))
        _, norm = optim.clip_grad_norm(gradients, 1.0)
        most = share * float(norm.item())  # type: ignore[arg-type]
        expected, _ = optim.clip_grad_norm(gradients, most)
        kept = Kept()
        method = clipping_mebp(bundle, adapters, kept, most, tmp_path, len(parts[0]))
        for _ in range(2):  # what stays from one step to the next must not matter
            kept.found.clear()
            result = method.step(0, 1e-3, parts)
        assert result.gradient_norm == pytest.approx(float(norm.item()), rel=CLOSE)  # type: ignore[arg-type]
        assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(loss, rel=CLOSE)
        agree(kept.found, expected)
        squares = sum(float(mx.square(one).sum().item()) for one in kept.found.values())  # type: ignore[arg-type]
        assert squares**0.5 == pytest.approx(min(share, 1.0) * most / share, rel=1e-4)


def test_a_norm_that_is_not_finite_updates_nothing(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("llama")
    adapters = adapters_of(bundle, rng)
    clipping, kept = Clipping(adapters, 1.0, tmp_path), Kept()
    block = bundle.manifest.layers[0]
    shapes = Adapters.shapes_of(bundle.manifest, block)
    name = bundle.manifest.adapted(block)[0]
    of = block.tensor(name)
    da, db = (mx.ones(shapes[f"{of}.{suffix}"]) for suffix in ("lora_a", "lora_b"))
    clipping.store(block, {name: (da * float(rng.choice([np.inf, np.nan])), db)})
    with pytest.raises(DivergedError, match="the norm of the gradients is"):
        clipping.apply(kept)  # type: ignore[arg-type]
    assert not kept.found


def test_the_plan_counts_the_scratch_file_and_no_further_memory(tiny: Tiny) -> None:
    manifest = tiny("gemma3").manifest
    adapters_bytes = sum(4 * a * b for a, b in Adapters.shapes(manifest).values())
    planner = Planner(manifest, LINUX)
    for accumulation in (1, 3):
        request = Request(32, 2, accumulation)
        free, clipped = (
            planner.plan(request, demand_of("mebp", 2, accumulation, max_grad_norm=most), 10**9)
            for most in (0.0, 1.0)
        )
        more = clipped.scratch_disk_bytes - free.scratch_disk_bytes
        assert more == adapters_bytes
        held = adapters_bytes if accumulation > 1 else 0
        assert free.gradient_bytes - clipped.gradient_bytes == held


def test_a_method_that_does_not_clip_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No method may ignore the limit without a word."""
    manifest = tiny("llama").manifest
    config = TrainConfig(bundle="b", data="d", max_seq_length=16, max_grad_norm=0.5)
    assert budget.training(config, manifest).demand.stores_gradients
    other = SimpleNamespace(demand=lambda config: Demand(backward=True))
    monkeypatch.setattr(budget, "method", lambda name: other)
    with pytest.raises(UsageError, match=r"--max-grad-norm 0.5: mebp does not clip"):
        budget.training(config, manifest)
