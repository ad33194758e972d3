"""Converts the metadata of a GGUF file to a Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import numpy as np

from export.sources.gguf_file import GGUFFile
from export.sources.gguf_names import ARCHITECTURES
from export.sources.source import F32
from runtime.core.errors import BundleError

ROPE_FREQS = "rope_freqs.weight"  # a table that Llama 3 files hold instead of metadata

_ROPE_SCALINGS = frozenset({"linear", "yarn"})
GEMMA_27B_LAYERS = 62  # the one size whose attention is not scaled by its head dimension


def read_config(file: GGUFFile, where: str) -> dict[str, Any]:
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
        return _config(file, arch, where)
    except (TypeError, ValueError) as e:  # a value of another type than it has to be
        raise BundleError(f"{where}: the metadata cannot be understood: {e}") from e


def _config(file: GGUFFile, arch: str, where: str) -> dict[str, Any]:
    meta = file.metadata

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise BundleError(f"{where}: metadata {arch}.{key} is missing")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    kv_heads = get("attention.head_count_kv", heads)
    if embedding is None:
        raise BundleError(f"{where}: token_embd.weight is missing")
    if not all(isinstance(value, int) and value > 0 for value in (hidden, heads, kv_heads)):
        raise BundleError(
            f"{where}: {arch}.embedding_length, attention.head_count and attention.head_count_kv "
            f"must be positive integers, are {hidden!r}, {heads!r} and {kv_heads!r}"
        )
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise BundleError(
            f"{where}: attention values of {get('attention.value_length')} numbers a head and keys "
            f"of {head_dim} are not supported; they must be equal"
        )
    if get("rope.dimension_count", head_dim) != head_dim:
        raise BundleError(
            f"{where}: RoPE over {get('rope.dimension_count')} of the {head_dim} numbers of a head "
            "is not supported; it must be over all"
        )
    gemma = arch == "gemma3"
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch],
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),  # from float32
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": float(get("rope.freq_base", 1e6 if gemma else 1e4)),
        "rope_scaling": _rope_scaling(file, arch, head_dim, where),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if gemma:
        large = config["num_hidden_layers"] == GEMMA_27B_LAYERS
        config |= {
            "sliding_window": get("attention.sliding_window"),
            "sliding_window_pattern": get("attention.sliding_window_pattern", 6),
            "query_pre_attn_scalar": hidden // heads if large else head_dim,
            "rope_local_base_freq": float(get("rope.freq_base_swa", 1e4)),
        }
    for key in ("bos_token_id", "eos_token_id"):
        if f"tokenizer.ggml.{key}" in meta:
            config[key] = meta[f"tokenizer.ggml.{key}"]
    return config


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int, where: str) -> dict[str, Any] | None:
    """RoPE scaling from the metadata, or from the table of factors that Llama 3 files hold."""
    meta = file.metadata
    if ROPE_FREQS in file.tensors:
        factors = file.rows(ROPE_FREQS, slice(None))
        base = float(meta.get(f"{arch}.rope.freq_base", 1e4))
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        published = llama3_factors(base, head_dim, scaling)
        if factors.shape != published.shape or not np.allclose(factors, published, rtol=1e-3):
            raise BundleError(f"{where}: {ROPE_FREQS} is not one of Llama 3's scalings")
        return scaling
    rope_type = meta.get(f"{arch}.rope.scaling.type", "none")
    if rope_type == "none":
        return None
    if rope_type not in _ROPE_SCALINGS:
        raise BundleError(
            f"{where}: RoPE scaling {rope_type!r} is not supported; "
            f"supported are {', '.join(sorted(_ROPE_SCALINGS))} and Llama 3's"
        )
    factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        length = meta.get(f"{arch}.rope.scaling.original_context_length")
        if length is None:
            raise BundleError(f"{where}: yarn needs {arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
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
