"""Rotary positions: equal to transformers' own functions over random settings, or refused."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
import numpy as np
import pytest
from model_types.tiny import tiny
from support.lengths import pairs
from support.rotary import Rng, settings_of
from transformers import LlamaConfig, modeling_rope_utils

from export.cut.unread import refuse_unread, unread
from export.sources.families import build_model, normalise_config
from export.sources.random import PRESETS
from export.sources.rope import SETTINGS
from runtime.core.errors import BundleError


class Array(np.ndarray[Any, Any]):
    """A NumPy array with the few methods of a tensor that transformers' functions call."""

    def to(self, dtype: Any, device: None = None) -> Self:
        return self.astype(dtype)

    def float(self) -> Self:
        return self.astype(np.float32)


class Torch:
    """The few functions of torch that transformers' rotary functions call, on NumPy arrays."""

    int64, float32, float = np.int64, np.float32, np.float32

    @staticmethod
    def arange(*bounds: int, dtype: Any = np.int64, device: None = None) -> Array:
        return np.arange(*bounds, dtype=dtype).view(Array)

    @staticmethod
    def tensor(values: list[float], dtype: Any, device: None = None) -> Array:
        return np.array(values, dtype).view(Array)

    clamp = staticmethod(np.clip)
    where = staticmethod(np.where)


def turned(x: np.ndarray[Any, Any], inverse: np.ndarray[Any, Any], factor: float) -> Any:
    """The heads (..., T, 2n) turned by n inverse frequencies, as transformers turns them."""
    angles = np.arange(x.shape[-2])[:, None] * inverse  # (T, n)
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("kind", sorted({*modeling_rope_utils.ROPE_INIT_FUNCTIONS}))
def test_positions_are_those_of_transformers(
    kind: str, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_rope_utils, "torch", Torch, raising=False)
    base = {**PRESETS["tiny-llama"], "head_dim": 32, "max_position_embeddings": 2048}
    base.pop("rope_scaling", None)
    if kind not in SETTINGS:
        with pytest.raises(BundleError, match=f"rope_type '{kind}' is not supported"):
            normalise_config(
                {**base, "rope_scaling": {"rope_type": kind, "factor": 2.0}}, "x", True
            )
        return
    x = rng.standard_normal((1, 2, 48, 32)).astype(np.float32)
    for _ in range(30):
        theta = float(rng.choice([1e4, 5e5, 1e6]))
        scaling = {"rope_type": kind, **settings_of(kind, rng)}
        raw = {**base, "rope_theta": theta, "rope_scaling": scaling}
        theirs = LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"})
        inverse, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs)
        model = build_model("llama", normalise_config(raw, "x", True))
        ours = np.array(model.layers[0].self_attn.rope(mx.array(x)))
        expected = turned(x, np.asarray(inverse), factor)
        # theirs are rounded to float32 three times, and turn the last token by up to 47 radians
        assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max(), raw


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "depend on the length of the sequence"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "with beta_fast"),
        ({"rope_type": "default", "beta_fast": 3}, "with beta_fast"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        *(
            ({"rope_type": "linear", "factor": value}, "factor of rotary positions must be a posi")
            for value in (0, -2.0, False, "2", [2.0])
        ),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor of rot"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}, "rope_scaling.beta_fast"),
        *(({"rope_type": kind}, "rope_type .* is not supported") for kind in ("", 0, False, [])),
        ({"rope_type": "llama3", "factor": 2.0}, "Missing required keys .*low_freq_factor"),
    ],
)
def test_what_cannot_be_computed_is_named(scaling: dict[str, Any], message: str) -> None:
    raw = {**PRESETS["tiny-llama"], "max_position_embeddings": 2048, "rope_scaling": scaling}
    with pytest.raises(BundleError, match=message):
        refuse_unread("llama", normalise_config(raw, "x", has_lm_head=True), raw, "x")


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "gemma3_text", "phi3", "ministral3"])
def test_a_base_or_a_share_that_turns_nothing_is_named(model_type: str) -> None:
    """Beside all other settings, among those of positions, and in those of a type of layer."""
    raw = tiny(model_type)
    for key, values in (
        ("rope_theta", (0, -1.0, False, "1e4", [1e4], {"x": 1})),
        ("partial_rotary_factor", (0, -1.0, 1.5, False, "1")),
        ("llama_4_scaling_beta", (-1.0, "x", [])),
        ("factor", ({"x": 999 * "1"},)),
    ):
        for value in values:
            nested = raw["rope_parameters"] | {key: value}
            for layers, scope in raw["rope_parameters"].items():
                if isinstance(scope, dict):
                    nested = raw["rope_parameters"] | {layers: scope | {key: value}}
            with pytest.raises(BundleError, match=f"^x: {key} .{{,120}}$"):
                normalise_config(raw | {"rope_parameters": nested}, "x", True)


def test_a_base_beside_the_scaling_counts() -> None:
    """As in transformers, where the base that stands among rope's settings has priority."""
    raw = {**PRESETS["tiny-llama"], "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
    raw.pop("rope_scaling", None)
    assert normalise_config(raw, "x", has_lm_head=True)["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("model_type", "kind"),
    pairs(("qwen3_moe", "cohere", "ernie4_5"), ("linear", "llama3", "yarn", "longrope")),
)
def test_classes_without_a_scaling_turn_heads_as_llamas_does(
    model_type: str, kind: str, rng: Rng
) -> None:
    """The first has the setting, and passes over it; the others turn neighbours."""
    x = rng.standard_normal((1, 2, 48, 16)).astype(np.float32)
    scaling = {"rope_type": kind, "rope_theta": 1e5, **settings_of(kind, rng, 16)}

    def turn(model_type: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raw = tiny(model_type, rope_parameters=scaling)
        config = normalise_config(raw, "x", True)
        assert not unread(config["model_type"], config, raw, "x")
        return np.array(build_model(model_type, config).layers[0].self_attn.rope(mx.array(x)))

    expected = turn("llama", x)
    if model_type != "qwen3_moe":
        apart = np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)
        x, expected = apart, np.stack(np.split(expected, 2, axis=-1), axis=-1).reshape(x.shape)
    assert np.abs(turn(model_type, x) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_scaling_of_one_type_of_layers_that_is_not_read_is_refused() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    for scaling, is_read in (({"rope_type": "linear"}, False), (yarn, True)):
        scopes = {"full_attention": {**plain, **scaling, "factor": 4.0}, "sliding_attention": plain}
        raw = tiny("mellum", rope_parameters=scopes, layer_types=[*scopes] * 2)
        config = normalise_config(raw, "x", True)
        assert bool(unread("mellum", config, raw, "x")) != is_read
    scopes["full_attention"] = {**plain, "rope_type": "dynamic", "factor": 4.0}
    with pytest.raises(BundleError, match="depend on the length"):
        build_model("mellum", normalise_config(tiny("mellum", rope_parameters=scopes), "x", True))
