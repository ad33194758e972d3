"""Converts the metadata of a GGUF file to a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from export.sources.general import settings_class
from export.sources.gguf_names import ARCHITECTURES
from export.stored import F32
from runtime.core.errors import BundleError

ROPE_FREQS = "rope_freqs.weight"  # a table that Llama 3 files have instead of metadata

_ROPE_SCALINGS = frozenset({"linear", "yarn"})
_HEAD_DIMS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
_PARTIAL = (
    "glm4",
    "phi3",
    "nemotron",
    "stablelm",
)  # architectures that may turn a part of each head
# an architecture's entries beside the sizes -> transformers' names of the settings
_OTHERS = {
    "granite": {
        **{"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"},
        **{"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
    },
    "command-r": {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"},
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
    "gpt2": {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    "exaone": {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "stablelm": {"attention.layer_norm_epsilon": "layer_norm_eps"},
    "qwen3moe": {
        **{"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}
# what llama.cpp computes in any case, where transformers has a setting for it
_ALWAYS = {"qwen3moe": {"norm_topk_prob": True}}
# a tensor -> the settings that are on if a file has it
_TOLD_BY = {
    "blk.0.attn_q.bias": ("attention_bias",),
    "blk.0.attn_output.bias": ("attention_out_bias", "use_bias"),
    "blk.0.ffn_up.bias": ("mlp_bias",),
}
_ALIKE = ("qwen2", "qwen3", "gemma3")  # with biases, or without, in every model
_CONVOLUTION = "conv"  # a type of layer
GEMMA_27B_LAYERS = 62  # the one size whose attention is not scaled by its head dimension


def entries_of(arch: str) -> dict[str, str]:
    """An architecture's entries for numbers beside the sizes, with transformers' names of these."""
    others = _OTHERS.get(arch, {})
    has_epsilon = any("epsilon" in key for key in others)
    return others if has_epsilon else {**others, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}


class Described(Protocol):
    """What a configuration is read from: a file, or what is about to be one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The entries by key."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, each with its `shape`."""

    def rows(self, name: str, index: slice) -> F32:
        """The rows of a tensor."""


def as_stated(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by the names of transformers, with the width that LFM2's MLPs really have."""
    names = settings_class(family).attribute_map.items()
    stated = {**config, **{name: config[own] for name, own in names if own in config}}
    stated.setdefault("intermediate_size", 4 * stated["hidden_size"])  # GPT-2's
    if "shared_intermediate_size" in stated:  # Granite 4's, which then has no experts
        stated["intermediate_size"] = stated["shared_intermediate_size"]
    if stated.get("block_auto_adjust_ff_dim"):
        part = stated["block_multiple_of"]
        width = int(stated["block_ffn_dim_multiplier"] * int(2 * stated["intermediate_size"] / 3))
        width = -(-width // part) * part
        stated |= {"intermediate_size": width, "block_auto_adjust_ff_dim": False}
    if _CONVOLUTION in (types := stated.get("layer_types") or ()):
        heads = stated["num_key_value_heads"]
        stated["num_key_value_heads"] = [heads * (kind != _CONVOLUTION) for kind in types]
    return stated


def read_config(file: Described, where: str) -> dict[str, Any]:
    """The configuration in the spelling of a Hugging Face config.json.

    Raises BundleError for another architecture, or metadata that is missing or makes no sense.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise BundleError(
            f"{where}: architecture {arch!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    try:
        return _config(_Metadata(file, arch, where))
    except (TypeError, ValueError) as e:  # a value of another type than it has to be
        raise BundleError(f"{where}: the metadata cannot be understood: {e}") from e


@dataclass(frozen=True)
class _Metadata:
    """The entries of a file about its architecture, by keys without the architecture's name."""

    file: Described
    arch: str
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        """An entry. Raises BundleError if it is missing and has no default."""
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise BundleError(f"{self.where}: metadata {self.arch}.{key} is missing")
        return value


def _config(entries: _Metadata) -> dict[str, Any]:
    file, arch, get = entries.file, entries.arch, entries.get
    hidden, heads, kv_heads = _widths(entries)
    head_dim = _head_dim(entries, hidden // heads)
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch],
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **{name: _number(get(key)) for key, name in entries_of(arch).items()},
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": float(get("rope.freq_base", 1e4)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if (scaling := _rope_scaling(entries, head_dim)) is not None:
        config["rope_scaling"] = scaling
    if arch not in _ALIKE:
        for tensor, names in _TOLD_BY.items():
            config |= dict.fromkeys(names, tensor in file.tensors)
    if arch in _PARTIAL:
        config["partial_rotary_factor"] = get("rope.dimension_count", head_dim) / head_dim
    if arch == "gemma3":
        large = config["num_hidden_layers"] == GEMMA_27B_LAYERS
        config |= {
            "query_pre_attn_scalar": hidden // heads if large else head_dim,
            "rope_local_base_freq": float(get("rope.freq_base_swa", 1e4)),
            **_gemma_windows(entries),
        }
    elif window := get("attention.sliding_window", 0):
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if window < config["max_position_embeddings"]:
            raise BundleError(
                f"{entries.where}: {arch}.attention.sliding_window = {window} is not supported; to "
                "train on sequences within it, set context_length to at most its width"
            )
    config |= _ALWAYS.get(arch, {})
    if arch == "lfm2":  # says the heads of each layer, none for convolutions
        heads_of = np.ravel(get("attention.head_count_kv")).tolist()
        types = [_CONVOLUTION if not heads else "full_attention" for heads in heads_of]
        config |= {"layer_types": types, "block_auto_adjust_ff_dim": False}
    for key in ("bos_token_id", "eos_token_id"):
        if f"tokenizer.ggml.{key}" in file.metadata:
            config[key] = file.metadata[f"tokenizer.ggml.{key}"]
    return config


def _number(value: float) -> float | int:
    """A value of float32 as it was written."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _gemma_windows(entries: _Metadata) -> dict[str, Any]:
    """Which layers see only so many tokens, as llama.cpp reads it: none without a window."""
    window = entries.get("attention.sliding_window", 0)
    if not window:
        return {"sliding_window_pattern": 1}
    pattern = entries.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):  # a value for each layer
        types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        return {"sliding_window": window, "layer_types": types}
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def _widths(entries: _Metadata) -> tuple[int, int, int]:
    """The width of the hidden state, the heads of queries, and those of keys and values."""
    hidden, heads = entries.get("embedding_length"), entries.get("attention.head_count")
    kv_heads = entries.get("attention.head_count_kv", heads)
    if entries.arch == "lfm2":
        kv_heads = int(np.max(kv_heads))
    if "token_embd.weight" not in entries.file.tensors:
        raise BundleError(f"{entries.where}: token_embd.weight is missing")
    if not all(isinstance(value, int) and value > 0 for value in (hidden, heads, kv_heads)):
        raise BundleError(
            f"{entries.where}: {entries.arch}.embedding_length, attention.head_count and "
            "attention.head_count_kv must be positive integers, are "
            f"{hidden!r}, {heads!r} and {kv_heads!r}"
        )
    return hidden, heads, kv_heads


def _head_dim(entries: _Metadata, default: int) -> int:
    """The numbers of a head's keys, of which there must be as many in a value and in RoPE."""
    head_dim: int = entries.get("attention.key_length", default)
    for key in _HEAD_DIMS:
        if key == "rope.dimension_count" and entries.arch in _PARTIAL:
            continue
        if (given := entries.get(key, head_dim)) != head_dim:
            raise BundleError(
                f"{entries.where}: {entries.arch}.{key} = {given!r} is not supported; values, keys "
                f"and positions must have the {head_dim} numbers of a head's keys"
            )
    return head_dim


def _rope_scaling(entries: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """RoPE scaling from the metadata, or from the table of factors that Llama 3 files have.

    The defaults are those of llama.cpp's loader, which has an older name of the factor, too.
    """
    arch, where = entries.arch, entries.where
    rope_type = entries.get("rope.scaling.type", "linear")
    factor = float(entries.get("rope.scaling.factor", entries.get("rope.scale_linear", 0)) or 1)
    is_plain = rope_type == "none" or (rope_type == "linear" and factor == 1)
    if has_rope_table(entries.file, arch):
        if not is_plain:
            raise BundleError(
                f"{where}: {ROPE_FREQS} beside {arch}.rope.scaling.type {rope_type!r} with factor "
                f"{factor:g} is not supported; one of both must go"
            )
        return _tabled_scaling(entries, head_dim)
    if is_plain:
        return None
    if rope_type not in _ROPE_SCALINGS:
        raise BundleError(
            f"{where}: RoPE scaling {rope_type!r} is not supported; "
            f"supported are {', '.join(sorted(_ROPE_SCALINGS))} and Llama 3's"
        )
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = entries.get(
            key, entries.get("context_length")
        )
    return scaling


def has_rope_table(file: Described, arch: str) -> bool:
    """Whether a file has a table of RoPE factors, which llama.cpp reads for llama alone."""
    return arch == "llama" and ROPE_FREQS in file.tensors


def _tabled_scaling(entries: _Metadata, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3 that a file's table was made by."""
    factors = entries.file.rows(ROPE_FREQS, slice(None))
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    published = llama3_factors(float(entries.get("rope.freq_base", 1e4)), head_dim, scaling)
    if factors.shape != published.shape or not np.allclose(factors, published, rtol=1e-4):
        raise BundleError(f"{entries.where}: {ROPE_FREQS} is not one of Llama 3's scalings")
    return scaling


def llama3_factors(base: float, head_dim: int, scaling: dict[str, Any]) -> F32:
    """The factors (head_dim / 2,) by which Llama 3 divides the rotary frequencies."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    # 1 for short waves, `factor` for long ones, a blend of their inverses between
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    factors: F32 = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    return factors
