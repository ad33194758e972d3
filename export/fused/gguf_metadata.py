"""The metadata of a GGUF file about a model: the inverse of `export.sources.gguf_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from export.sources import gguf_gemma4
from export.sources.families import completed_config, normalise_config
from export.sources.gguf_config import (
    FACTORS,
    LISTED,
    LLAMA3,
    LONGROPE,
    ROPE_FREQS,
    WINDOWED,
    as_stated,
    llama3_factors,
    read_config,
)
from export.sources.gguf_entries import BY_SIGMOID, OF_SCALING, SIGMOID, entries_of
from export.sources.rope import ORIGINAL_LENGTH, longrope
from export.sources.settings import is_neutral_name, neutral_settings
from export.sources.windows import FULL, SLIDING, layer_types, unlike_full
from export.stored import F32
from runtime.core.errors import UsageError

_USUAL_EPSILON = 1e-6
_CLOSE = 1e-6  # of a number that a file has in float32
# kinds of scalings are refused one by one; the others are sizes that LFM2 computes its own of
_NOT_COMPARED = {
    *("model_type", "rope_scaling", "original_max_position_embeddings", "block_ff_dim"),
    *("block_multiple_of", "block_ffn_dim_multiplier"),
}
_YARN = {"rope_type", "type", "factor", "original_max_position_embeddings"}
_USUAL = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # what llama.cpp has


def add_metadata(writer: GGUFWriter, family: str, config: dict[str, Any], vocab_size: int) -> None:
    """Give a writer the architecture of a normalised configuration.

    Raises:
        UsageError: llama.cpp computes the model in another way; the message names the setting.
    """
    config = as_stated(family, config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = head_dim_of(config)
    writer.add_vocab_size(vocab_size)
    if not isinstance(config.get("max_position_embeddings"), int):
        raise _refusal("max_position_embeddings", "none", "a number")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    part = config.get("partial_rotary_factor")
    turned = config.get("qk_rope_head_dim") or int(head_dim * (1 if part is None else part))
    still = config.get("qk_nope_head_dim")
    writer.add_key_length(head_dim if still is None else still + turned)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(turned)
    if family == "qwen3_5":
        if config["rms_norm_eps"] != _USUAL_EPSILON:  # which transformers has for them in any case
            knows = f"{_USUAL_EPSILON}: it takes it for the lengths of queries and keys too"
            raise _refusal("rms_norm_eps", config["rms_norm_eps"], knows)
        keys, values = (config[f"linear_{part}_head_dim"] for part in ("key", "value"))
        if keys != values:  # on which llama.cpp's gated delta rule aborts
            knows = f"{values}, which is linear_value_head_dim: it has one size for both"
            raise _refusal("linear_key_head_dim", keys, knows)
        # of images, whose positions are those of text here
        pairs = turned // 2
        writer.add_rope_dimension_sections([*((pairs + 2 - axis) // 3 for axis in range(3)), 0])
    for key, name in entries_of(family).items():
        if config[name] is None:
            raise _refusal(name, None, "a number")
        value = float(config[name]) if key == "expert_weights_scale" else config[name]
        adds = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
        adds[type(value)](f"{writer.arch}.{key}", value)
    if family in BY_SIGMOID:
        writer.add_expert_gating_func(ExpertGatingFuncType(SIGMOID))
    if "rope_theta" in config:
        writer.add_rope_freq_base(float(config["rope_theta"]))
    _add_rope_scaling(writer, family, config)
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(float(config["rope_local_base_freq"]))
    types = config.get("layer_types") or ()
    if family in WINDOWED:
        writer.add_sliding_window(config["sliding_window"] or 0)
        periods = range(1, len(types) + 2)
        period = next((n for n in periods if layer_types(n, len(types)) == types), 0)
        if not period or WINDOWED[family][1] == LISTED:
            writer.add_sliding_window_pattern([kind == SLIDING for kind in types])
        elif period != WINDOWED[family][1]:  # which not all of llama.cpp's versions read
            writer.add_sliding_window_pattern(period)
    elif SLIDING in types:
        raise _refusal("layer_types", SLIDING, f"{FULL} in every layer")


@dataclass(frozen=True)
class Announced:
    """What a writer has been told, as a reader will find it."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]
    tables: dict[str, F32]

    def rows(self, name: str, index: slice) -> F32:
        return self.tables[name][index]


def check_metadata(writer: GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """Read back the configuration that a writer has been told with its tensors.

    Raises:
        UsageError: a setting is another one there, since the file cannot say it.
    """
    if ROPE_FREQS in writer.tensors[0] and family in LLAMA3:
        return  # Llama 3's, whose settings are refused one by one: read are published tables alone
    entries = {key: entry.value for key, entry in writer.kv_data[0].items()}
    raw = read_config(Announced(entries, writer.tensors[0], rope_tables(config)), family)
    again = normalise_config(raw, family, not raw["tie_word_embeddings"])
    again = completed_config(again["model_type"], again)
    if config.get("position_embedding_type", "rope") != "rope":
        raise _refusal("position_embedding_type", config["position_embedding_type"], "rope")
    config, again = as_stated(family, config), as_stated(family, again)
    off = set() if unlike_full(config) else {"sliding_window"}  # where all layers see all tokens
    for key in sorted(config.keys() & again.keys() - neutral_settings() - _NOT_COMPARED - off):
        read, own = again[key], config[key]
        close = isinstance(own, float) and abs(own - read) <= _CLOSE * abs(own)
        if read != own and not close and not is_neutral_name(key):
            raise _refusal(key, own, repr(read))


def head_dim_of(config: dict[str, Any]) -> int:
    """The numbers of a head's keys and values, in layers without a window."""
    return int(
        config.get("global_head_dim")
        or config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"]
    )


def rope_tables(config: dict[str, Any]) -> dict[str, F32]:
    """The tables that files have of the scalings of Llama 3 and Gemma 4, and of LongRoPE."""
    scaling = config.get("rope_scaling") or {}
    if isinstance(full := (config.get("rope_parameters") or {}).get(FULL), dict):
        return {ROPE_FREQS: gguf_gemma4.factors(full, head_dim_of(config))}
    if _type_of(scaling) == "llama3":
        base = float(config["rope_theta"])
        return {ROPE_FREQS: llama3_factors(base, head_dim_of(config), scaling)}
    return {
        table: np.array(scaling[key], np.float32)
        for key, table in FACTORS.items()
        if _type_of(scaling) == "longrope"
    }


def _add_rope_scaling(writer: GGUFWriter, family: str, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = _type_of(scaling)
    if family == "gemma4_text":
        if kind != "proportional" or {*scaling} - {"rope_type", "partial_rotary_factor"}:
            raise _refusal(f"rope_parameters of {FULL}", scaling, "proportional, with a part")
        return
    if kind == "default" or (kind == "llama3" and family in LLAMA3):
        return
    if kind == "longrope" and family in LONGROPE:
        longest = config["max_position_embeddings"]
        turned = 2 * len(scaling["short_factor"])
        factor = longrope(scaling, float(config["rope_theta"]), turned, longest)[1]
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(factor)
        writer.add_rope_scaling_orig_ctx_len(scaling[ORIGINAL_LENGTH])
        return
    if kind not in ("linear", "yarn"):
        raise _refusal(
            "rope_scaling", kind, "linear, yarn, llama3 for Llama and Apertus, longrope for Phi 3"
        )
    others = {key: value for key, value in scaling.items() if key not in _YARN}
    for key, name in OF_SCALING.get(family, {}).items():
        writer.add_float32(f"{writer.arch}.{key}", others.pop(name))
    if others.get("mscale") == scaling.get("mscale_all_dim"):  # llama.cpp has one for both
        others.pop("mscale", None)
    if more := {key: value for key, value in others.items() if _USUAL.get(key) != value}:
        said = ", ".join(f"{key} {value}" for key, value in sorted(more.items()))
        raise _refusal("rope_scaling", f"{kind} with {said}", "without these")
    writer.add_rope_scaling_type(RopeScalingType(kind))
    writer.add_rope_scaling_factor(float(scaling["factor"]))
    if kind == "yarn":
        length = scaling.get(ORIGINAL_LENGTH, config["max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(length)


def _type_of(scaling: dict[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _refusal(setting: str, value: object, possible: str) -> UsageError:
    return UsageError(
        f"--format gguf: the model has {setting} {value}, which a GGUF file cannot say; llama.cpp "
        f"knows {possible}. Use --format hf"
    )
