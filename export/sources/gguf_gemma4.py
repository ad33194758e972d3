"""What GGUF files say of Gemma 4 by layer, and configurations by type of layer: in both directions.

Layers with windows have other heads than those without, which turn a part of each head alone. The
last ones have the keys and values of earlier layers, and may have MLPs of twice the width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from export.sources.windows import FULL, SLIDING
from export.stored import F32

CAP = "final_logit_softcapping"
# entries of layers with windows, which all are the size of their heads
WINDOWED_HEAD_DIMS = (
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
)
# a file's entries beside the usual ones -> the settings
ENTRIES = {
    **{"attention.shared_kv_layers": "num_kv_shared_layers", CAP: CAP},
    **dict.fromkeys(WINDOWED_HEAD_DIMS, "head_dim"),
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    **{"expert_count": "num_experts", "expert_used_count": "top_k_experts"},
    "expert_feed_forward_length": "moe_intermediate_size",
}
DEFAULTS = dict.fromkeys(  # of llama.cpp's loader, or what the converter leaves out
    ("attention.shared_kv_layers", "embedding_length_per_layer_input", "expert_count"), 0
) | {"expert_used_count": 0, "expert_feed_forward_length": 0}
_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_NEVER = 1e30  # the factor of a pair that positions do not turn


def stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration as files say them, with 0 where there is none."""
    layers, types = config["num_hidden_layers"], config["layer_types"]
    own, heads = layers - config["num_kv_shared_layers"], config["num_key_value_heads"]
    same = config.get("attention_k_eq_v")  # in layers without a window
    whole = (config.get("num_global_key_value_heads") if same else None) or heads
    width, doubled = config["intermediate_size"], config.get("use_double_wide_mlp") and own > 0
    nested = config["rope_parameters"]
    full, local = (dict(nested.get(kind) or {}) for kind in (FULL, SLIDING))
    experts = _EXPERTS if config.get("enable_moe_block") else ()
    has_table = bool(config.get("hidden_size_per_layer_input"))
    return {
        "num_key_value_heads": [whole if kind == FULL else heads for kind in types],
        "num_global_key_value_heads": None,
        "intermediate_size": [width * (2 if doubled and at >= own else 1) for at in range(layers)],
        "use_double_wide_mlp": None,
        "global_head_dim": config.get("global_head_dim") or config["head_dim"],
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size_per_layer_input"] if has_table else 0,
        CAP: float(config.get(CAP) or 0),
        **{name: config[name] if name in experts else 0 for name in _EXPERTS},
        "rope_local_base_freq": local.pop("rope_theta", 1e4),
        f"rope_parameters of {SLIDING}": {
            key: value for key, value in local.items() if value not in (None, 1, "default")
        },
        "rope_parameters": None,
        "rope_theta": full.pop("rope_theta", 1e4),
        "rope_scaling": full,
    }


def settings(
    get: Callable[[str, Any], Any], tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a file that differ by type of layer.

    Args:
        get: an entry of the file, or a default.
        tensors: of the file, by name.
        config: what has been read so far, with types of layers and the scaling of positions.

    Raises ValueError for sizes that differ otherwise.
    """
    types = config["layer_types"]
    widths, heads = (
        np.broadcast_to(get(key, None), len(types)).tolist()
        for key in ("feed_forward_length", "attention.head_count_kv")
    )
    heads_of = dict(zip(types, heads, strict=True))
    own = len(types) - config["num_kv_shared_layers"]
    doubled = widths[-1] != widths[0]
    if [heads_of[kind] for kind in types] != heads or widths != [
        widths[0] * (2 if doubled and at >= own else 1) for at in range(len(types))
    ]:
        raise ValueError(
            f"feed_forward_length is {widths} and attention.head_count_kv {heads}; the first must "
            f"be one number, or twice as much in the last {config['num_kv_shared_layers']} layers, "
            f"and the second be a number of layers with windows and one of all others"
        )
    sizes = {key: get(key, config["head_dim"]) for key in WINDOWED_HEAD_DIMS}
    if {*sizes.values()} != {config["head_dim"]}:
        raise ValueError(f"{sizes} must be one number, that of all numbers of a head")
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "proportional":
        raise ValueError("layers without a window need rope_freqs.weight, and no other scaling")
    values = [f"blk.{at}.attn_v.weight" in tensors for at in range(own) if types[at] == FULL]
    return {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": doubled,
        "num_key_value_heads": heads_of.get(SLIDING, heads[0]),
        "num_global_key_value_heads": heads_of.get(FULL),
        "attention_k_eq_v": bool(values) and not any(values),
        "global_head_dim": get("attention.key_length", None),
        CAP: float(f"{get(CAP, 30.0):.7g}") or None,
        "enable_moe_block": config["num_experts"] > 0,
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]},
            FULL: {**scaling, "rope_theta": config["rope_theta"]},
        },
    }


def factors(scaling: Mapping[str, Any], head_dim: int) -> F32:
    """The factors (head_dim / 2,) of rotary frequencies, of which the last never turn."""
    turned = int(head_dim * scaling.get("partial_rotary_factor", 1) / 2)
    table: F32 = np.full(head_dim // 2, _NEVER, np.float32)
    table[:turned] = 1
    return table


def scaling_of(table: F32, head_dim: int) -> dict[str, Any]:
    """The scaling of positions that such factors are made of. Raises ValueError for others."""
    turned = int((table == 1).sum())
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / head_dim}
    if not np.array_equal(table, factors(scaling, head_dim)):
        raise ValueError(
            f"rope_freqs.weight must have {head_dim // 2} numbers, 1 where positions turn and then "
            f"{_NEVER:g}"
        )
    return scaling
