"""Configurations and tensors of any model type, as mlx-lm's classes take them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from model_types.tiny import tiny

from export.sources.general import normalised, tensors_made
from runtime.core.errors import BundleError

SHAPES = {"a": (6, 3), "b": (2, 3), "c": (5,), "d": (2, 3, 4), "e": ()}


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, sanitize: Any) -> None:
        self.sanitize = sanitize


def test_tensors_are_renamed_split_by_rows_and_left_out() -> None:
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        first, second, third = mx.split(weights.pop("a"), 3, axis=0)
        weights.pop("c")
        return {
            "first": first,
            "third": third,
            "second": second,
            "renamed": weights.pop("b"),
            **weights,
        }

    assert tensors_made(Model(sanitize), SHAPES, "x") == {
        "first": [("a", 0, 2)],
        "second": [("a", 2, 2)],
        "third": [("a", 4, 2)],
        "renamed": [("b", 0, 2)],
        "d": [("d", 0, 6)],
        "e": [("e", 0, 1)],
    }
    rows = {"a": 6, "b": 2, "c": 5, "d": 6, "e": 1}
    assert tensors_made(object(), SHAPES, "x") == {
        name: [(name, 0, count)] for name, count in rows.items()
    }


def test_experts_are_stacked_and_split() -> None:
    """As mlx-lm stacks a matrix of each expert, or splits one that has gate and up."""

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        gate, up = mx.split(weights["both"], 2, axis=1)
        return {"joined": mx.stack([weights["b"], weights["a"]]), "gate": gate, "up": up}

    shapes = {"a": (4, 6), "b": (4, 6), "both": (3, 8, 6)}
    assert tensors_made(Model(sanitize), shapes, "x") == {
        "joined": [("b", 0, 4), ("a", 0, 4)],
        "gate": [("both", 0, 4), ("both", 8, 4), ("both", 16, 4)],
        "up": [("both", 4, 4), ("both", 12, 4), ("both", 20, 4)],
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:, ::-1],
        lambda a: a[:, :2],
        lambda a: a.T,
        lambda a: 2 * a,
        lambda a: a.reshape(3, 6),
        lambda a: mx.stack([a, a]).swapaxes(1, 2),
    ],
)
def test_tensors_that_are_made_otherwise_are_refused(change: Any) -> None:
    with pytest.raises(BundleError, match="rearranges a"):
        tensors_made(Model(lambda weights: {"a": change(weights["a"])}), SHAPES, "x")


def test_what_sanitize_misses_is_named() -> None:
    with pytest.raises(BundleError, match="other"):
        tensors_made(Model(lambda weights: {"x": weights["other.weight"]}), SHAPES, "x")


@pytest.mark.parametrize("nested", [True, False])
def test_positions_are_read_from_either_spelling(nested: bool) -> None:
    raw = tiny("granite", rope_theta=5e5)
    assert raw["rope_parameters"]["rope_theta"] == 5e5
    if not nested:
        del raw["rope_parameters"]
        raw["rope_theta"] = 5e5
    assert normalised(raw, "granite", "x", False)["rope_theta"] == 5e5


def test_what_is_left_out_is_as_in_transformers() -> None:
    raw = {key: value for key, value in tiny("cohere").items() if key != "logit_scale"}
    assert normalised(raw, "cohere", "x", False)["logit_scale"] == 0.0625
    with pytest.raises(BundleError, match="num_hidden_layers must be from 1 to 1024, is 0"):
        normalised({**raw, "num_hidden_layers": 0}, "cohere", "x", False)


def test_layers_with_a_window_are_said_as_the_class_takes_them() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = normalised(tiny("cohere2", layer_types=types), "cohere2", "x", False)
    assert config["sliding_window_pattern"] == 2
    config = normalised(tiny("exaone4", layer_types=types), "exaone4", "x", False)
    assert config["sliding_window_pattern"] == "LGLG"
    with pytest.raises(BundleError, match="irregular"):
        normalised(tiny("cohere2", layer_types=types[::-1]), "cohere2", "x", False)
