"""Configurations of any model type, as mlx-lm's classes take them."""

from __future__ import annotations

from typing import Any

import pytest
from model_types.tiny import tiny

from export.cut.unread import unread
from export.sources.families import (
    check_architecture,
    expected_shapes,
    normalise_config,
    text_config,
    transformers_config,
)
from export.sources.general import completed, normalised
from export.sources.settings import unknown_settings
from export.sources.verified import is_verified, tried_types
from runtime.core.errors import BundleError


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


@pytest.mark.parametrize(
    ("outer", "inside", "family"),
    [
        ("llava", "llama", "llama"),
        ("llava", "qwen2", "qwen2"),
        ("mistral3", "mistral", "llama"),
        ("mistral3", "ministral3", "ministral3"),
        ("qwen3_vl", "qwen3_vl_text", "qwen3"),
        ("aya_vision", "cohere2", "cohere2"),  # mlx-lm has no class for the outer model
        ("qwen3_5", "qwen3_5_text", "qwen3_5"),  # nor here for the inner one
        ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe"),  # whose class is a subclass
    ],
)
def test_the_text_model_inside_has_its_own_class(outer: str, inside: str, family: str) -> None:
    raw = {"model_type": outer, "text_config": {"model_type": inside}}
    assert check_architecture(raw, "x") == family


def test_settings_of_text_beside_those_of_a_tower_are_found() -> None:
    raw = {**tiny("qwen2"), "model_type": "qwen2_vl", "vision_config": {"depth": 2}}
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config = normalise_config(raw, "x", False)
    assert config["model_type"] == "qwen2"
    assert (config["hidden_size"], config["rope_theta"]) == (64, 5e5)
    assert "rope_scaling" not in config
    assert text_config(raw, "x")["model_type"] == "qwen2_vl_text"
    assert unknown_settings("qwen2", raw, "x") == []
    assert unknown_settings("qwen2", {**raw, "novelty": 3}, "x") == ["novelty"]
    with pytest.raises(BundleError, match="attention_novelty = 3"):
        unknown_settings("qwen2", {**raw, "attention_novelty": 3}, "x")


@pytest.mark.parametrize("text", [3, [], {"model_type": 3}, {"hidden_size": "a"}])
def test_a_damaged_text_config_is_refused(text: Any) -> None:
    with pytest.raises(BundleError):
        normalise_config({"model_type": "llava", "text_config": text}, "x", False)


# what LFM2 350M's config.json says beside the sizes that every model has
PUBLISHED_LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 16,
    "block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "full_attn_idxs": [1, 3],
    "norm_eps": 1e-5, "rope_theta": 1e6, "theta": 1e6, "use_pos_enc": True,
}  # fmt: skip


def test_lfm2_is_read_as_its_makers_write_it() -> None:
    raw = {"model_type": "lfm2", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 320}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, **PUBLISHED_LFM2}
    config = normalised(raw, "lfm2", "x", False)
    assert config["layer_types"] == ["conv", "full_attention"] * 2
    assert expected_shapes("lfm2", config)["model.layers.0.feed_forward.w1.weight"] == (64, 64)
    assert "block_use_swiglu" in unknown_settings("lfm2", raw, "x")  # which a warning names
    assert not unread("lfm2", config, raw, "x")


# what Qwen 3.5 0.8B's config.json says of its text model beside the sizes
PUBLISHED_QWEN35 = {
    "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4,
    "hidden_act": "silu", "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "tie_word_embeddings": True,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen35_is_read_as_its_makers_write_it(family: str) -> None:
    text = {**tiny(f"{family}_text"), **PUBLISHED_QWEN35, "model_type": f"{family}_text"}
    if family == "qwen3_5_moe":
        text |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
    raw = {"model_type": family, "text_config": text, "vision_config": {"depth": 12}}
    config = normalise_config(raw, "x", False)
    assert (config["model_type"], config["full_attention_interval"]) == (family, 4)
    positions = {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert config["rope_parameters"] == positions
    assert "mtp_num_hidden_layers" in unknown_settings(family, raw, "x")
    assert not unread(family, config, text, "x")
    irregular = ["full_attention", "linear_attention"] * 2
    with pytest.raises(BundleError, match="irregular"):
        normalise_config({**raw, "text_config": {**text, "layer_types": irregular}}, "x", False)


_IN_FLOAT32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
# what their makers' configurations say beside what transformers reads, and no warning tells
BESIDE: dict[str, dict[str, Any]] = {
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "cohere2": {"rotary_pct": 1.0, "use_gated_activation": True},
    "starcoder2": {
        **dict.fromkeys((*_IN_FLOAT32, "scale_attn_weights"), True),
        **{"norm_type": "layer_norm", "layer_norm_epsilon": 1e-5},
    },
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "hunyuan_v1_dense": {
        **{"attention_head_dim": 16, "norm_type": "rms", "use_rotary_pos_emb": True},
        **{"use_cla": False, "cla_share_factor": 2},
        **{"num_experts": 1, "moe_topk": 1, "norm_topk_prob": True, "vit_norm_type": "fused"},
    },
    "qwen2": {"_attn_implementation_autoset": True, "attn_implementation": "sdpa"},
    "llama": {
        **{"use_flash_attention_2": True, "fuse_rms_norm": True, "initializer_factor": 0.5},
        **{"emb_factor": 1.0, "pixel_shuffle_factor": 4},
    },
    "glm": {"partial_rotary_factor": 1.0},
    "stablelm": {"rotary_scaling_factor": 1.0},
    "exaone": {"activation_function": "silu"},
    "mimo": {"sliding_window": 256, "use_mrope": False},
    "minicpm": {"hidden_act": "silu"},
    **{name: {"max_window_layers": 4} for name in ("smollm3", "qwen3_moe")},
    "gpt_oss": {"experts_per_token": 2},
    "afmoe": {"num_expert_groups": 1, "num_limited_groups": 1},
}


@pytest.mark.parametrize("model_type", BESIDE)
def test_what_makers_write_beside_is_not_refused(model_type: str) -> None:
    raw = {**tiny(model_type), **BESIDE[model_type]}
    assert not BESIDE[model_type].keys() & {*unknown_settings(model_type, raw, "x")}


@pytest.mark.parametrize(
    ("model_type", "key", "is_read"),
    [
        ("qwen3_moe", "use_qk_norm", True),  # as of Qwen 3 Coder
        ("mimo", "attention_bias", True),
        ("qwen2", "qkv_bias", True),
        ("mixtral", "use_qk_norm", False),
        ("mixtral", "use_qkv_bias", False),
    ],
)
def test_what_tensors_show_is_not_refused(model_type: str, key: str, is_read: bool) -> None:
    raw = {**tiny(model_type), key: True}
    names = expected_shapes(model_type, normalise_config(raw, "x", True))
    if is_read:
        assert key not in unknown_settings(model_type, raw, "x", names)
        return
    with pytest.raises(BundleError, match=f"{key} = True is not supported"):
        unknown_settings(model_type, raw, "x", names)


def test_another_value_than_the_usual_is_refused() -> None:
    for model_type, setting in (
        ("phi3", {"full_attn_mod": 2}),
        ("phi3", {"rotary_pct": 0.5}),
        ("mimo", {"sliding_window": 128, "max_position_embeddings": 256}),
        ("hunyuan_v1_dense", {"num_experts": 2, "norm_topk_prob": True}),
        ("llama", {"emb_factor": 2.5}),
        ("llama", {"rope_type": "yarn"}),  # which transformers reads in rope_parameters alone
        ("gpt_oss", {"factor": 16.0}),
    ):
        with pytest.raises(BundleError, match=f"{next(iter(setting))} = "):
            unknown_settings(model_type, {"model_type": model_type, **setting}, "x")
    # where transformers reads the other name of a setting, this one is told
    raw = {**tiny("gemma2"), "hidden_act": "gelu"}
    assert unknown_settings("gemma2", raw, "x") == ["hidden_act"]


@pytest.mark.parametrize(
    ("model_type", "setting", "is_read"),
    [
        ("gpt2", {"activation_function": "gelu"}, True),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, True),
        ("gpt2", {"activation_function": "relu"}, False),  # of which its class knows nothing
        ("gpt_neox", {"hidden_act": "gelu_new"}, True),
        ("apertus", {"qk_norm": True}, True),
        ("gpt2", {"scale_attn_weights": False}, False),
        ("lfm2", {"conv_L_cache": 4}, True),
        # Qwen 3 4B of July 2025, Granite 4.0, and gpt-oss' window, wider than what is tried
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000}}, True),
        ("granite", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}}, True),
        ("gpt_oss", {"sliding_window": 128}, True),
        ("minicpm", {"hidden_act": "silu"}, True),  # of which transformers has no class
        ("minicpm", {"hidden_act": "gelu"}, False),
        ("afmoe", {"topk_group": 1}, True),  # as its class has it where it is left out
        ("dots1", {"scoring_func": "softmax"}, False),
        ("dots1", {"scoring_func": "noaux_tc"}, True),
        ("glm4", {"rope_traditional": True}, True),
        ("glm4", {"rope_traditional": False}, False),
        ("qwen3_5_text", {"hidden_act": "gelu"}, False),  # whose random decays were constants
        ("gemma4_text", {"global_partial_rotary_factor": 0.25}, True),
        ("gemma4_text", {"global_partial_rotary_factor": 0.5}, False),
        # Granite 4.0 micro, and Gemma 4 31B, which turns images alone around
        ("granitemoehybrid", {"num_experts_per_tok": 0}, True),
        ("granitemoehybrid", {"position_embedding_type": "nope", "rope_theta": 1e7}, True),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}, True),
        ("gemma4_text", {"use_double_wide_mlp": True, "num_kv_shared_layers": 0}, True),
        ("gemma4_text", {"use_bidirectional_attention": "all", "is_causal": False}, False),
    ],
)
def test_settings_are_found_that_a_class_passes_over(
    model_type: str, setting: dict[str, Any], is_read: bool
) -> None:
    raw = {**tiny(model_type), **setting}
    config = normalise_config(raw, "x", not raw.get("tie_word_embeddings"))
    assert unread(config["model_type"], config, raw, "x") == ({} if is_read else setting)


@pytest.mark.parametrize(
    ("model_type", "norms", "is_read"),
    [
        ("glm4_moe", "norm_topk_prob", False),
        ("solar_open", "norm_topk_prob", False),
        ("dots1", "norm_topk_prob", False),
        ("afmoe", "route_norm", False),
        ("qwen3_moe", "norm_topk_prob", True),
    ],
)
def test_the_weight_of_a_single_expert_is_normed_or_refused(
    model_type: str, norms: str, is_read: bool
) -> None:
    """Some classes norm weights only where a token has several, transformers does so always."""
    for count in (1, 2):
        raw = {**tiny(model_type), "num_experts_per_tok": count, norms: True}
        config = normalise_config(raw, "x", True)
        refused = unread(config["model_type"], config, raw, "x")
        assert ("num_experts_per_tok" in refused) == (count == 1 and not is_read)


@pytest.mark.parametrize(
    "wrong",
    [{"sliding_window": 0}, {"sliding_window": -1}]
    + [{"num_experts_per_tok": chosen} for chosen in (-1, 0, 5, 2.0, True)],
)
def test_a_number_that_chooses_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """What mlx-lm would compute with: no window, or all experts but one."""
    raw = tiny("mixtral") | wrong
    (key,) = wrong
    with pytest.raises(BundleError, match=key):
        normalise_config(raw, "x", True)


@pytest.mark.parametrize("key", ["logits_scaling", "embedding_multiplier"])
@pytest.mark.parametrize("wrong", [0, -1.0])
def test_a_factor_of_nothing_is_refused(key: str, wrong: float) -> None:
    """With a scaling of 0, every logit is NaN."""
    with pytest.raises(BundleError, match=f"{key} must be a positive number, is {wrong!r}"):
        normalise_config(tiny("granite") | {key: wrong}, "x", True)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_no_layer_has_may_be_any_number(window: int) -> None:
    """As in transformers, where such a model computes what it does without one."""
    raw = tiny("smollm3") | {"sliding_window": window}
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    config = normalise_config(raw, "x", True)
    assert not unread("smollm3", config, raw, "x")


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("lfm2", "chunked_attention"),
        ("lfm2", "sliding_attention"),
        ("gpt_oss", "conv"),
        ("gemma3_text", "chunked_attention"),
    ],
)
def test_a_type_of_layer_is_not_taken_for_another(model_type: str, kind: str) -> None:
    raw = tiny(model_type)
    raw["layer_types"] = [kind, *raw["layer_types"][1:]]
    with pytest.raises(BundleError, match=f"layer_types has '{kind}', which is not supported"):
        normalise_config(raw | {"sliding_window": 16}, "x", True)


@pytest.mark.parametrize(
    "off", [{"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}]
)
@pytest.mark.parametrize(("model_type", "reads"), [("phi3", False), ("qwen2", True)])
def test_windows_are_off_only_by_settings_that_transformers_reads(
    model_type: str, reads: bool, off: dict[str, Any]
) -> None:
    raw = {**tiny(model_type), "num_hidden_layers": 2, "layer_types": None, **off}
    raw["sliding_window"] = 6
    config = normalise_config(raw, "x", True)
    assert unread(model_type, config, raw, "x") == ({} if reads else {"sliding_window": 6})


def test_a_share_that_is_turned_may_stand_beside_a_width_of_null() -> None:
    raw = {**tiny("stablelm"), "partial_rotary_factor": 0.25, "head_dim": None}
    config = normalise_config(raw, "x", True)
    assert not unread("stablelm", config, raw, "x")


def test_hunyuans_fixed_scaling_is_another_base() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    raw = {**tiny("hunyuan_v1_dense"), "rope_theta": 1e4, "rope_scaling": scaling}
    raw.pop("rope_parameters", None)
    config = normalise_config(raw, "x", True)
    assert config["rope_theta"] == pytest.approx(1e4 * 1000 ** (16 / 14))
    assert config.get("rope_scaling") is None
    with pytest.raises(BundleError, match=r"rope_type 'dynamic' .* delete it there"):
        normalise_config({**raw, "model_type": "llama"}, "x", True)


def test_a_pattern_without_windows_is_none() -> None:
    raw = {**tiny("exaone4"), "layer_types": ["full_attention"] * 4, "sliding_window": None}
    raw["sliding_window_pattern"] = None  # as EXAONE 4.0 1.2B
    assert expected_shapes("exaone4", normalise_config(raw, "x", True))
    with pytest.raises(BundleError, match="neither a window nor positions"):
        normalise_config({**raw, "sliding_window": 16}, "x", True)


@pytest.mark.parametrize(
    "types",
    [
        ("internlm3", "phi3", "gpt2", "olmo2"),  # the first has a width of heads of its own
        pytest.param(tuple(filter(is_verified, tried_types())), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_the_settings_that_are_written_are_those_of_the_source(types: tuple[str, ...]) -> None:
    """To transformers: in every key that its class has of the model as it was, and of ours.

    A text model that is alone has none of the settings of images, with which text is the same.
    """
    of_images = {"use_bidirectional_attention": "vision"}
    for model_type in set(types) - {"muse_glimmer"}:  # no class of the text model alone
        raw = tiny(model_type)
        config = normalise_config(raw, model_type, not raw.get("tie_word_embeddings"))
        text = text_config(raw, model_type)
        own_type = model_type if text["model_type"] == model_type else None
        written = transformers_config(config["model_type"], config, "float32", own_type)
        before, after = (completed(text_config(one, model_type)) for one in (text, written))
        assert before is not None and after is not None
        if own_type is None:
            before = {key: value for key, value in before.items() if of_images.get(key) != value}
            before.get("rope_parameters", {}).pop("mrope_section", None)
        after.get("rope_parameters", {}).pop("type", None)  # longrope's, for mlx-lm's class
        unlike = {key for key in before.keys() & after.keys() if before[key] != after[key]}
        unlike -= {
            *("dtype", "architectures", "max_window_layers"),  # there is no window
            *(("model_type",) if own_type is None else ()),
        }
        assert not unlike, model_type
