"""Updates of joined tensors against the library's rule, tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.bundles import Rng, Tiny

from runtime.arrays.values import Gradients
from runtime.methods.adapters import Adapters
from runtime.methods.optimizer import GROUP_VALUES, Optimizer, groups
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
                for tensor, shape in Adapters.shapes_of(manifest, block).items()
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
