"""Tiny configurations of any model type, as transformers 5 writes them, and changes of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from export.cut.unread import another_value
from export.sources.families import TEXT_TYPES, check_architecture, text_config
from export.sources.general import completed, default_settings
from export.sources.model_classes import arguments_of, model_module, module_names
from runtime.core.errors import BundleError

Settings = dict[str, Any]

VOCABULARY = 320
# sizes under all the names that configurations have for them; few axes are alike
WIDTHS = ("hidden_size", "n_embd", "d_model", "model_dim", "dim", "word_embed_proj_dim")
MLPS = ("intermediate_size", "n_inner", "ffn_hidden_size", "mlp_hidden_size", "ffn_dim")
SIZES: Settings = {
    **dict.fromkeys(WIDTHS, 64),
    **dict.fromkeys(MLPS, 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("vocab_size", "embedding_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **{"head_dim": 16, "kv_channels": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8},
    **{"dim_model_base": 32, "n_shared_head": 2, "shared_intermediate_size": 96},
    **{"q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 24},
    **{"linear_value_head_dim": 16, "v_head_dim": 16, "query_pre_attn_scalar": 24},
}
# what the classes that transformers has not need besides
OTHERS: Settings = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-5),
    **{"norm_epsilon": 1e-5, "rope_theta": 1e4, "rope_freq_constant": 1e4, "scale_depth": 1.4},
    **{"scale_emb": 12.0, "no_bias": True, "bias": False, "qkv_bias": False},
    **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    **{"num_transformer_layers": 4, "num_query_heads": [4] * 4, "ffn_multipliers": [1.5] * 4},
    **{"ffn_dim_divisor": 8, "ffn_with_glu": True, "normalize_qk_projections": True},
    **{"share_input_output_layers": True, "rope_parameters": {"rope_theta": 1e4}},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256},
    **{"factor": 1.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.1, 1.2, 1.3]},
}
SCALED = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
}
OF_IMAGES = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
# where a class of mlx-lm has no setting for a size, or passes over windows
_NEAR_0 = "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
OF_TYPE: dict[str, Settings] = {
    "gpt_neox": {"intermediate_size": 256},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma4_unified_text": {"global_head_dim": 32, "final_logit_softcapping": 30.0},
    "gemma4_text": {
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY},
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 32},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": None},
        **{"moe_intermediate_size": None, "final_logit_softcapping": 30.0},
    },
    **{name: {"n_inner": None} for name in ("gptj", "gpt2")},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "minicpm3": {"rope_parameters": LONG, "tie_word_embeddings": False, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "full_attn_idxs": None},
    "lfm2_moe": {
        **{"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2},
    },
    # its norms of outputs near 0 enlarge errors of rounding: with 1e-6 transformers is as far as
    # 2e-5 from float64
    **{name: {"rms_norm_eps": 1e-3} for name in _NEAR_0},
    "dots1": {"n_shared_experts": 1},
    # with 0.75, three times the usual, softmax enlarges rounding to 1.1e-5
    "granitemoe": {"attention_multiplier": 0.2},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    **{key: {"rope_parameters": OF_IMAGES} for key in ("qwen2_vl_text", "qwen2_5_vl_text")},
    **{name: {"sliding_window": None} for name in ("mistral", "mixtral", "starcoder2")},
    # as in Phi-4-mini
    "phi3": {
        **{"sliding_window": None, "original_max_position_embeddings": 128},
        "rope_parameters": {
            **{**LONG, "factor": 2.0, "original_max_position_embeddings": 128},
            "partial_rotary_factor": 0.5,
        },
    },
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {**SCALED, "max_position_embeddings": 256},
    },
}
OF_TYPE |= {  # what their classes need besides, named as nowhere else
    "Klear": {
        **{"mlp_only_layers": [], "decoder_sparse_step": 1, "n_shared_experts": 1},
        "norm_topk_prob": True,
    },
    "minimax": {"shared_intermediate_size": 96, "rotary_dim": 8},
    "minimax_m2": {"shared_intermediate_size": 96, "rotary_dim": 8},
    "qwen3_vl_moe_text": {
        **{"norm_topk_prob": True, "rope_parameters": OF_IMAGES, "sliding_window": None},
    },
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "deepseek_v2": {
        "rope_parameters": {k: v for k, v in SCALED.items() if k != "llama_4_scaling_beta"},
    },
    "bailing_moe_linear": {
        **{"num_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1},
        **{"layer_group_size": 2, "group_norm_size": 2},
    },
    "afm7": {"hidden_dim": 64, "num_kv_reuse_layers": 1},
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
    "solar_open": {
        **{"intermediate_size": 96, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    },
    "spark2_5": {
        "rope_parameters": {
            name: {"rope_theta": 1e4, "rope_type": "default"}
            for name in ("full_attention", "sliding_attention")
        }
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False},
                "ffn": {"ffn_mult": 1.5, "no_op": False},
            }
        ]
        * 4
    },
    "longcat_flash_ngram": {
        **{"moe_topk": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 1},
        **{"routed_scaling_factor": 1.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    },
    "glm_moe_dsa": {
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
# of what sees or hears, which is not read
TOWER: Settings = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **{"out_hidden_size": 64, "head_dim": 16, "image_size": 28, "patch_size": 14},
    **{"layer_types": ["full_attention"], "fullatt_block_indexes": [0]},
    **{"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
# text models inside of types of which transformers does not know that they have one
INSIDE = {"kimi_vl": "deepseek_v3", "lfm2-vl": "lfm2", "pixtral": "mistral"}
# what is not changed: names, and what is done at the two ends for all types alike
ALWAYS = ("model_type", "tie_word_embeddings", "time_step_limit")
SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS = re.compile("multipl|scal")


def model_types() -> list[str]:
    """The types that mlx-lm has a class for, by the names that configurations have."""
    elsewhere = [
        name for name, module in MODEL_REMAPPING.items() if completed({"model_type": name})
    ]
    return sorted({*module_names(), *elsewhere, *TEXT_TYPES} - {"__init__"})


def is_model(model_type: str) -> bool:
    """Whether a module of mlx-lm is a model, and not what models import."""
    try:
        model_module(family_of(model_type))
    except BundleError as problem:
        return "it is no model" not in str(problem)
    return True


def family_of(model_type: str) -> str:
    """The module of mlx-lm that a type's model, or the text model inside, has its class in."""
    raw: Settings = {"model_type": model_type}
    if model_type in INSIDE:
        raw["text_config"] = {"model_type": INSIDE[model_type]}
    try:
        return check_architecture(raw, model_type)
    except BundleError:  # what is wrong with it, the caller finds too
        return MODEL_REMAPPING.get(model_type, model_type)


def text_type(model_type: str) -> str:
    """The type of the text model inside of a type's model, by default; the type itself else."""
    if model_type in INSIDE:
        return INSIDE[model_type]
    return str(text_config({"model_type": model_type}, model_type)["model_type"])


def tiny(model_type: str, **changes: Any) -> Settings:
    """A configuration of a few thousand weights; factors that are 1 by default are others."""
    if model_type in INSIDE:
        return {"model_type": model_type, "text_config": tiny(INSIDE[model_type], **changes)}
    if (inside := text_type(model_type)) != model_type:
        whole = completed({"model_type": model_type, "text_config": tiny(inside, **changes)})
        assert whole is not None
        for key, tower in whole.items():
            if key != "text_config" and isinstance(tower, dict) and "model_type" in tower:
                tower |= {name: size for name, size in TOWER.items() if name in tower}
        tied = {key: value for key, value in whole["text_config"].items() if key.startswith("tie_")}
        return {**whole, **tied}
    defaults = completed({"model_type": model_type})
    if defaults is None:
        known = arguments_of(family_of(model_type))
        sizes = {key: value for key, value in {**OTHERS, **SIZES}.items() if key in known}
        if "num_query_heads" in sizes:  # one a layer
            sizes["num_kv_heads"] = [2] * 4
        own = OF_TYPE.get(model_type, {})
        return {**sizes, **own, "model_type": model_type, **changes}
    sizes = {key: value for key, value in SIZES.items() if key in defaults}
    factors = {
        key: 0.75
        for key, value in defaults.items()
        if _FACTORS.search(key) and isinstance(value, float) and value == 1
    }
    own = {**sizes, **factors, **OF_TYPE.get(model_type, {}), **changes}
    whole = completed({"model_type": model_type, **own})
    assert whole is not None
    return whole


def changes(model_type: str) -> Iterator[Settings]:
    """Settings of a type, each with another value than by default."""
    family, model_type = family_of(model_type), text_type(model_type)
    base = tiny(model_type)
    settings = {**(default_settings(model_type, family) or {}), **base}
    for key in sorted(settings.keys() & arguments_of(family) - {*SIZES, *ALWAYS}):
        value = settings[key]
        if key in ("partial_rotary_factor", "rotary_pct"):
            yield {key: 0.75 if value == 0.5 else 0.5}
        elif isinstance(value, list) and value != value[::-1]:
            yield {key: value[::-1]}
        elif isinstance(value, bool | float):
            yield {key: another_value(key, value)}
    if "rope_scaling" in arguments_of(family):
        own = {key: v for key, v in base.get("rope_parameters", {}).items() if key in OF_IMAGES}
        yield {"rope_scaling": {**own, **SCALING}}
