"""The entries of GGUF files for settings, with the names that transformers has for these."""

from __future__ import annotations

import re

from export.sources import gguf_gemma4
from runtime.core.errors import BundleError

_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL = {**_EXPERTS, "expert_count": "num_local_experts"}
_SCALES = {
    **{"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"},
    **{"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
}
_OWN_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_SHARING = {
    **{**_EXPERTS, **_OWN_WIDTH, "expert_count": "n_routed_experts"},
    **{"expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor"},
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_norm": "norm_topk_prob",
}
# families whose routers have a sigmoid, and the number that files have for it
BY_SIGMOID = ("glm4_moe", "solar_open", "dots1", "afmoe", "minimax")
SIGMOID = 2
INNER = "linear_inner_size"  # of all heads of values
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# a family's entries beside the sizes -> transformers' names of the settings
_OTHERS = {
    **{"granite": _SCALES, "granitemoehybrid": _SCALES, "granitemoe": _SCALES | _LOCAL},
    **{"mixtral": _LOCAL, "olmoe": _EXPERTS, "qwen3_moe": _EXPERTS | _OWN_WIDTH},
    **{"qwen2_moe": _EXPERTS | _OWN_WIDTH | _SHARED_WIDTH},
    "gpt_oss": {**_LOCAL, "expert_feed_forward_length": "intermediate_size"},
    "gemma2": dict(zip(_CAPS, _CAPS, strict=True)),
    **{"cohere": {"logit_scale": "logit_scale"}, "cohere2": {"logit_scale": "logit_scale"}},
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "gemma4_text": gguf_gemma4.ENTRIES,
    **dict.fromkeys(("glm4_moe", "solar_open", "dots1"), _SHARING),
    "afmoe": {
        **_EXPERTS,
        **_OWN_WIDTH,
        **{"expert_shared_count": "num_shared_experts", "expert_weights_scale": "route_scale"},
        **{"leading_dense_block_count": "num_dense_layers", "expert_weights_norm": "route_norm"},
    },
    "minimax": {**_LOCAL, "expert_feed_forward_length": "intermediate_size"},
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
    "minicpm3": {f"attention.{rank}": rank for rank in ("q_lora_rank", "kv_lora_rank")},
    "qwen3_5": {
        **{"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim"},
        **{"ssm.group_count": "linear_num_key_heads", "ssm.inner_size": INNER},
        "ssm.time_step_rank": "linear_num_value_heads",
        "full_attention_interval": "full_attention_interval",
    },
}
# the epsilon of a family's norms, where it is not `rms_norm_eps`: with a mean, and without
_LAYER_NORMS = {
    **dict.fromkeys(("cohere", "cohere2", "phi", "stablelm", "gpt_neox"), "layer_norm_eps"),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), "layer_norm_epsilon"),
    **{"starcoder2": "norm_epsilon", "nemotron": "norm_eps"},
}
_RMS_NORMS = {"lfm2": "norm_eps", "exaone": "layer_norm_epsilon"}
# entries for the scaling of positions -> transformers' names inside of it
OF_SCALING = {
    "ministral3": {
        "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        "attention.temperature_scale": "llama_4_scaling_beta",
    }
}
# transformers' names of what every file has -> the entries
_SIZES = {
    **{"num_hidden_layers": "block_count", "hidden_size": "embedding_length"},
    **{"intermediate_size": "feed_forward_length", "head_dim": "attention.key_length"},
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
}


def entries_of(family: str) -> dict[str, str]:
    """A family's entries for numbers beside the sizes, with transformers' names of these."""
    rms = "attention.layer_norm_rms_epsilon", _RMS_NORMS.get(family, "rms_norm_eps")
    with_mean = "attention.layer_norm_epsilon", _LAYER_NORMS.get(family, "")
    return {**_OTHERS.get(family, {}), **dict([with_mean if family in _LAYER_NORMS else rms])}


def as_in_file(problem: BundleError, family: str, arch: str) -> BundleError:
    """The error to raise for one about a configuration, with the entries of what it names."""
    names = {**_SIZES, **{name: key for key, name in entries_of(family).items()}}
    said = []
    for name, key in names.items():
        words = name.removeprefix("num_").replace("_", "[_ ]")  # as some messages have the names
        if re.search(rf"(?<![\w/])(num_)?{words}(?![\w/])", str(problem)):
            said.append(f"{name} is {arch}.{key}")
    return BundleError(f"{problem} (in the file {', '.join(said)})") if said else problem
