"""Updates of joined tensors against the library's rule, and the clipping of their gradients."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.lengths import at_length, pairs
from support.models import FAMILIES, Kept, adapters_of, agree, mebp_of, model_of, rows_of
from support.plans import LINUX, demand_of

from runtime.arrays.values import Gradients
from runtime.core.errors import DivergedError
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.methods.clipping import Clipping
from runtime.methods.optimizer import GROUP_VALUES, Optimizer, groups
from runtime.plan.plan import Request, Task
from runtime.plan.planner import Planner
from runtime.storage.saves import VERSION


def test_groups_hold_every_tensor_in_order(rng: Rng) -> None:
    shapes = {f"t{i}": (int(rng.integers(1, 60)), int(rng.integers(1, 9))) for i in range(50)}
    most = int(rng.integers(50, 900))
    found = groups(shapes, most)
    assert [name for group in found for name in group.names] == list(shapes)
    assert [shape for group in found for shape in group.shapes] == list(shapes.values())
    for group, after in zip(found, [*found[1:], None], strict=True):
        assert group.ends[-1] == sum(map(math.prod, group.shapes))
        assert group.ends[-1] <= most or len(group.names) == 1
        if after is not None:  # none is begun while there is room
            assert group.ends[-1] + math.prod(after.shapes[0]) > most


def test_what_lies_together_in_a_save_of_version_3() -> None:
    shapes = {"a": (896, 8), "b": (8, 4864), "c": (8, 2368), "d": (8, 1), "e": (8, 9728), "f": (1,)}
    found = [group.names for group in groups(shapes, GROUP_VALUES)]
    assert VERSION == 3 and found == [("a", "b", "c", "d"), ("e",), ("f",)]


@pytest.mark.parametrize("most", [1, 3000, GROUP_VALUES])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_librarys_rule_tensor_by_tensor(
    tiny: Tiny, tmp_path: Path, rng: Rng, name: str, most: int
) -> None:
    manifest = tiny("qwen2").manifest
    seed = int(rng.integers(1 << 30))
    adapters = Adapters.initial(manifest, seed)
    optimizer = Optimizer(adapters, name, 0.1, tmp_path, most)
    expected = dict(Adapters.initial(manifest, seed).tensors)
    rules: dict[str, optim.Optimizer] = {
        tensor: optim.AdamW(0.01, weight_decay=0.1, bias_correction=True)
        if name == "adamw"
        else optim.SGD(0.01, weight_decay=0.1)
        for tensor in expected
    }
    for step in range(3):
        rate = float(rng.uniform(1e-3, 1e-1))
        optimizer.begin(step, rate)
        if step == 2:  # what is written and read again goes on alike
            optimizer.write(tmp_path / "state")
            optimizer = Optimizer(adapters, name, 0.1, tmp_path, most)
            optimizer.read(tmp_path / "state")
            optimizer.begin(step, rate)
        for block in manifest.layers:
            fresh = {
                tensor: mx.array(rng.normal(size=shape).astype(np.float32))
                for tensor, shape in manifest.adapter_shapes(block).items()
            }
            gradients: Gradients = {
                of: (
                    fresh[f"{block.tensor(of)}.lora_a"],
                    fresh[f"{block.tensor(of)}.lora_b"],
                )
                for of in manifest.adapted(block)
            }
            optimizer.apply(block, dict(reversed(gradients.items())))
            for tensor, gradient in fresh.items():
                rules[tensor].learning_rate = rate
                one = rules[tensor].apply_gradients({"x": gradient}, {"x": expected[tensor]})
                expected[tensor] = one["x"]
    for tensor, value in expected.items():
        assert mx.array_equal(adapters.tensors[tensor], value), tensor


CLOSE = 1e-5


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
        clipping = Clipping(adapters, most, tmp_path)
        model, rows = model_of(bundle, 32), len(parts[0])
        method = mebp_of(model, adapters, kept, tmp_path, rows, clipping=clipping)
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
    shapes = bundle.manifest.adapter_shapes(block)
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
            planner.plan(
                Task(request, demand_of("mebp", 2, accumulation, max_grad_norm=most)), 10**9
            )
            for most in (0.0, 1.0)
        )
        more = clipped.scratch_disk_bytes - free.scratch_disk_bytes
        assert more == adapters_bytes
        held = adapters_bytes if accumulation > 1 else 0
        assert free.gradient_bytes - clipped.gradient_bytes == held
