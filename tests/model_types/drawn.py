"""Random settings of any model type, of all that transformers' class of it has."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from support.rotary import settings_of

from model_types.tiny import Settings, text_type, tiny

Rng = np.random.Generator

# what computes nothing, is of training or generation, or makes tensors that are refused by name
_LEFT_OUT = re.compile(
    "drop|_token|_coef$|jitter|init|_std$|cache|summary|mtp|mamba|time_step|vision|audio|output_"
    "|is_|cross_attention|pretraining_tp|chunk|dtype|return_dict|model_type|vocab|architectures"
)
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu2")
# the values of settings that no rule below finds
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 24, 32),
    "max_position_embeddings": (96, 128, 4096),
    "sliding_window": (5, 16, 40, 500),
    "max_window_layers": (0, 1, 3, 4),
    "no_rope_layer_interval": (1, 2, 3),
    "sliding_window_pattern": (1, 2, 3),
    "global_attn_every_n_layers": (1, 2, 3),
    "num_experts_per_tok": (1, 2, 3, 4),
    "top_k_experts": (1, 2, 3),
    "decoder_sparse_step": (1, 2, 3),
    "first_k_dense_replace": (0, 1, 2, 4),
    "num_dense_layers": (0, 1, 3),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (0, 1, 2),
    "shared_expert_intermediate_size": (32, 80),
    "moe_intermediate_size": (32, 48),
    "intermediate_size": (96, 160),
    "conv_L_cache": (2, 3, 4, 5),
    "block_multiple_of": (16, 32),
    "linear_conv_kernel_dim": (2, 3, 4),
    "linear_num_value_heads": (2, 4, 8),
    "linear_num_key_heads": (1, 2),
    "linear_key_head_dim": (8, 32),
    "linear_value_head_dim": (8, 32),
    "num_kv_shared_layers": (0, 1, 2),
    "hidden_size_per_layer_input": (0, 16),
    "global_head_dim": (16, 64),
    "num_global_key_value_heads": (None, 1, 4),
    "query_pre_attn_scalar": (8, 24, 100),
    "rotary_dim": (4, 8, 16),
    "word_embed_proj_dim": (64, 32),
    "final_logit_softcapping": (None, 2.0, 30.0),
    "attn_logit_softcapping": (None, 2.0, 50.0),
    "clip_qkv": (0.5, 8.0),
    "q_lora_rank": (24, None),
    "qk_nope_head_dim": (8, 16),
    "qk_rope_head_dim": (4, 16),
    "v_head_dim": (8, 24),
    "position_embedding_type": ("rope", "nope", None),
}
BY_LAYER: dict[str, tuple[Any, ...]] = {
    "no_rope_layers": (0, 1),
    "mlp_layer_types": ("dense", "sparse"),
}
ROPES = ("default", "linear", "yarn", "longrope", "llama3")


def drawn(rng: Rng, model_type: str) -> Settings:
    """Some changes of a type's tiny configuration, which may not go together."""
    import transformers

    kind = text_type(model_type)
    base = tiny(kind)
    names = {*base} - {*transformers.PreTrainedConfig().to_dict()} | {"head_dim"}
    names |= {"tie_word_embeddings"} & {*base}
    options = sorted(name for name in names if not _LEFT_OUT.search(name))
    chosen = rng.permutation(options)[: rng.integers(1, 7)]
    found = {
        str(name): value
        for name in chosen
        if (value := another(rng, base, str(name))) is not Ellipsis
    }
    if found.keys() & {"n_group", "topk_group"}:
        found |= {"n_group": 2, "topk_group": int(rng.integers(1, 3))}
    if "rope_parameters" in base and rng.random() < 0.5:
        found["rope_parameters"] = positions(rng, {**base, **found})
    if rng.random() < 0.3:
        found["dtype"] = str(rng.choice(["float16", "bfloat16"]))
    return found


def another(rng: Rng, base: Settings, name: str) -> Any:
    """Another value of a setting of a configuration; ... where there is none to draw."""
    value, layers = base.get(name), base.get("num_hidden_layers", 4)
    if name in CHOICES:
        return CHOICES[name][rng.integers(len(CHOICES[name]))]
    if name in BY_LAYER:
        return [BY_LAYER[name][rng.integers(2)] for _ in range(layers)]
    if name == "layer_types":
        own = {*base[name]} - {"full_attention"}
        kinds = ("full_attention", min(own, default="sliding_attention"))
        return [kinds[rng.integers(2)] for _ in range(layers)]
    if name == "layer_rope_theta":
        return [float(10 ** rng.uniform(3, 6)) * (rng.random() < 0.8) for _ in range(layers)]
    if name == "mlp_only_layers":
        return sorted(map(int, rng.permutation(layers)[: rng.integers(0, 3)]))
    if re.search("hidden_act|activation", name):
        return str(rng.choice(ACTIVATIONS))
    if isinstance(value, bool):
        return not value
    if re.search("eps", name):
        return float(10 ** rng.uniform(-6, -1))
    if isinstance(value, float) or re.search("multiplier|scal|swiglu", name):
        return round(float((value or 1) * rng.uniform(0.4, 2.5)), 4)
    return ...


def positions(rng: Rng, config: Settings) -> Settings:
    """Rotary positions, of each type of layer where a class has them so."""
    given = config["rope_parameters"] or {}
    scopes = {key: value for key, value in given.items() if isinstance(value, dict)}
    width = config.get("head_dim") or config.get("hidden_size", 64) // config["num_attention_heads"]

    def one(before: Settings) -> Settings:
        kind = str(rng.choice(ROPES))
        share = before.get("partial_rotary_factor")
        if rng.random() < (0.1 if share is None else 0.5):
            share = float(rng.choice([0.25, 0.5, 0.75, 1.0]))
        found: Settings = {"rope_type": kind, "rope_theta": float(10 ** rng.uniform(3, 7))}
        found |= {} if share is None else {"partial_rotary_factor": share}
        found |= {key: value for key, value in before.items() if key.startswith("mrope")}
        if kind != "default":
            dims = int(width * (share or 1))
            found |= settings_of(kind, rng, dims)
        if kind == "longrope" and rng.random() < 0.5:
            found["long_factor"] = rng.uniform(1, 4, len(found["short_factor"])).tolist()
        return found

    plain = {"sliding_attention"} if rng.random() < 0.7 else set[str]()
    by_type = {key: value if key in plain else one(value) for key, value in scopes.items()}
    return by_type or one(given)
