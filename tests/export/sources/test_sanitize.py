"""The tensors of mlx-lm's models, as its classes make them of a checkpoint's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from model_types.tiny import tiny

from export.sources.families import build_model, normalise_config, parameter_shapes
from export.sources.sanitize import Made, tensors_made, usual_origins
from runtime.adapters.origins import Origin
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
        "first": [Made("a", 0, 2)],
        "second": [Made("a", 2, 2)],
        "third": [Made("a", 4, 2)],
        "renamed": [Made("b", 0, 2)],
        "d": [Made("d", 0, 6)],
        "e": [Made("e", 0, 1)],
    }
    assert tensors_made(Model(lambda weights: {"a": weights["a"].T}), SHAPES, "x") == {
        "a": [Made("a", 0, 3, True)]
    }
    rows = {"a": 6, "b": 2, "c": 5, "d": 6, "e": 1}
    assert tensors_made(object(), SHAPES, "x") == {
        name: [Made(name, 0, count)] for name, count in rows.items()
    }


def test_experts_are_stacked_and_split() -> None:
    """As mlx-lm stacks a matrix of each expert, or splits one that has gate and up."""

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        gate, up = mx.split(weights["both"], 2, axis=1)
        return {"joined": mx.stack([weights["b"], weights["a"]]), "gate": gate, "up": up}

    shapes = {"a": (4, 6), "b": (4, 6), "both": (3, 8, 6)}
    assert tensors_made(Model(sanitize), shapes, "x") == {
        "joined": [Made("b", 0, 4), Made("a", 0, 4)],
        "gate": [Made("both", 0, 4), Made("both", 8, 4), Made("both", 16, 4)],
        "up": [Made("both", 4, 4), Made("both", 12, 4), Made("both", 20, 4)],
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:, ::-1],
        lambda a: a[:4].T,
        lambda a: a[:, ::-1].T,
        lambda a: 2 * a,
        lambda a: a.reshape(3, 6),
        lambda a: mx.stack([a, a]).swapaxes(1, 2),
    ],
)
def test_tensors_that_are_made_otherwise_are_refused(change: Any) -> None:
    with pytest.raises(BundleError, match="rearranges a"):
        tensors_made(Model(lambda weights: {"a": change(weights["a"])}), SHAPES, "x")


def test_filters_are_turned_and_norms_are_shifted() -> None:
    """As in Qwen 3.5, whose norms scale by 1 + w in transformers."""

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {"filter": weights["f"].moveaxis(2, 1), "norm": weights["norm"] + 1.0}

    shapes = {"f": (5, 1, 4), "norm": (6,)}
    made = tensors_made(Model(sanitize), shapes, "x")
    assert made == {"filter": [Made("f", 0, 5)], "norm": [Made("norm", 0, 6, shift=1.0)]}
    for other in (lambda v: 2 * v, lambda v: v[::-1], lambda v: v[1:], lambda v: v + v + 1.0):
        with pytest.raises(BundleError, match="rearranges norm"):
            tensors_made(Model(lambda w, f=other: {"norm": f(w["norm"])}), shapes, "x")
    with pytest.raises(BundleError, match="rearranges"):
        tensors_made(Model(lambda w: {"filter": w["f"][:, :, ::-1]}), shapes, "x")


def test_a_class_that_misses_a_tensor_is_named_with_it_and_a_way_out() -> None:
    """As those do that stack experts, of a checkpoint with a file too few."""
    said = r"Model cannot read these tensors: it asks for experts\.1\. A file .* download it again"
    with pytest.raises(BundleError, match=f"x: .*{said}"):
        tensors_made(Model(lambda weights: {"all": weights["experts.1"]}), SHAPES, "x")
    raw = tiny("dots1")
    config = normalise_config(raw, "x", True)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    with pytest.raises(BundleError, match=r"mlx_lm\.models\.dots1\.Model of mlx-lm [\d.]+ cannot"):
        tensors_made(build_model("dots1", config), {name: (32, 64)}, "x")


@pytest.mark.parametrize(
    ("family", "name", "origin"),
    [
        (
            "gpt_neox",
            "model.h.1.attention.query_key_value.weight",
            Origin("gpt_neox.layers.1.attention.query_key_value.weight", 0, 192, 192),
        ),
        (
            "granitemoehybrid",
            "model.layers.2.mlp.up_proj.weight",
            Origin("model.layers.2.shared_mlp.input_linear.weight", 96, 96, 192),
        ),
        (
            "gptj",
            "model.h.3.attn.q_proj.weight",
            Origin("transformer.h.3.attn.q_proj.weight", 0, 64, 64),
        ),
        (
            "nanochat",
            "transformer.h.1.attn.c_proj.weight",
            Origin("model.layers.1.self_attn.o_proj.weight", 0, 64, 64),
        ),
        (
            "nanochat",
            "transformer.h.1.mlp.c_proj.weight",
            Origin("model.layers.1.mlp.fc2.weight", 0, 64, 64),
        ),
        ("gpt_neox", "model.embed_out.weight", Origin("embed_out.weight", 0, 320, 320)),
        (
            "gpt2",
            "model.h.0.attn.c_attn.weight",
            Origin("transformer.h.0.attn.c_attn.weight", 0, 192, 192, True),
        ),
        ("gpt2", "model.wpe.weight", Origin("transformer.wpe.weight", 0, 256, 256)),
        (
            "gemma4_text",
            "model.layers.1.embed_tokens_per_layer.weight",
            Origin("model.embed_tokens_per_layer.weight", 0, 320, 320, columns=(32, 32, 128)),
        ),
    ],
)
def test_sources_without_tensors_of_transformers_know_its_names(
    family: str, name: str, origin: Origin
) -> None:
    config = normalise_config(tiny(family), "x", True)
    model = build_model(family, config)
    assert usual_origins(family, model, parameter_shapes(model))[name] == [origin]


def test_a_tied_model_is_sanitized_more_than_once() -> None:
    model = build_model("gemma3_text", normalise_config(tiny("gemma3_text"), "x", True))
    shapes = parameter_shapes(model)
    shapes.pop("lm_head.weight")
    for _ in range(2):
        assert tensors_made(model, shapes, "x").keys() == shapes.keys()
