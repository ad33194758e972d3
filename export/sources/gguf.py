"""A GGUF file as a model source: llama.cpp's names, norms and row order turned back.

llama.cpp's converter adds 1 to Gemma's norm weights and reorders the query and key rows of llama;
both are undone here, so that rows are what the original checkpoint held (up to quantization).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from export.sources.families import expected_shapes, normalise_config
from export.sources.gguf_file import GGUFFile
from export.sources.gguf_tokenizer import convert_tokenizer
from export.sources.source import F32, Checkpoint, check_tensors
from ondevice.errors import BundleError

# GGUF architecture -> family
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {
    "gemma3_text": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
_PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}
_ROPE_FREQS = "rope_freqs.weight"
_GEMMA_27B_LAYERS = 62  # the one size whose attention is not scaled by its head dimension


class GGUFCheckpoint(Checkpoint):
    """A single GGUF file of a supported architecture.

    Raises BundleError for another architecture, a split, truncated or inconsistent file.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        meta = self._file.metadata
        arch = meta.get("general.architecture")
        if not isinstance(arch, str) or arch not in ARCHITECTURES:
            raise BundleError(
                f"{path}: architecture {arch!r} is not supported; "
                f"supported are {', '.join(sorted(ARCHITECTURES))}"
            )
        if meta.get("split.count", 1) not in (0, 1):
            raise BundleError(
                f"{path}: one of {meta['split.count']} parts; join them first with "
                "llama-gguf-split --merge"
            )
        family = ARCHITECTURES[arch]
        self._stored = _stored_names(self._file, family)  # mlx-lm's name -> the file's
        try:
            raw = _config(self._file, arch, str(path))
        except (TypeError, ValueError) as e:  # a value of another type than it has to be
            raise BundleError(f"{path}: the metadata cannot be understood: {e}") from e
        config = normalise_config(raw, str(path), "lm_head.weight" in self._stored)
        expected = expected_shapes(family, config, str(path))
        found = {name: self._file.tensors[stored].shape for name, stored in self._stored.items()}
        check_tensors(str(path), expected, found)
        kinds = Counter(self._file.tensors[stored].kind for stored in self._stored.values())
        for kind in kinds:
            try:  # one block of zeros tells whether the type can be read
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise BundleError(f"{path}: tensors of type {kind.name} cannot be read") from None
        provenance = {
            "kind": "gguf",
            "name": str(meta.get("general.name", path.stem)),
            "architecture": arch,
            "files": [{"name": path.name, "bytes": self._file.bytes}],
            "types": {kind.name: count for kind, count in sorted(kinds.items())},
        }
        super().__init__(family, config, provenance, expected)

    def rows(self, name: str, start: int, stop: int) -> F32:
        shape = self._check_rows(name, start, stop)
        stored = self._stored[name]
        heads = {
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        }
        key = heads.get(".".join(name.split(".")[-3:-1]))
        if self.family == "llama" and key is not None:
            # rows (half, j) of each head are stored as (j, half)
            order = np.arange(shape[0]).reshape(self.config[key], -1, 2).swapaxes(1, 2).reshape(-1)
            return self._file.rows(stored, order[start:stop])
        values = self._file.rows(stored, slice(start, stop))
        if self.family == "gemma3_text" and name.endswith("norm.weight"):
            values -= 1
        return values

    def tokenizer_files(self) -> dict[str, bytes]:
        return convert_tokenizer(self._file.metadata, str(self.provenance["name"]))

    def close(self) -> None:
        super().close()
        del self._file


def _stored_names(file: GGUFFile, family: str) -> dict[str, str]:
    """mlx-lm's name -> the file's, for all of its tensors but the RoPE table."""
    layer = {**_LAYER, **_NORMS.get(family, _PLAIN_NORMS)}
    names: dict[str, str] = {}
    for stored in file.tensors:
        if stored == _ROPE_FREQS:
            continue
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
        base, _, leaf = stored.rpartition(".")
        if block and block[2] in layer:
            names[f"model.layers.{block[1]}.{layer[block[2]]}.{block[3]}"] = stored
        elif base in _TOP:
            names[f"{_TOP[base]}.{leaf}"] = stored
        else:
            names[stored] = stored  # reported by the comparison with what is expected
    return names


def _config(file: GGUFFile, arch: str, where: str) -> dict[str, Any]:
    """A Hugging Face style configuration from the metadata."""
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
            f"{where}: sizes {hidden}, {heads} and {kv_heads} must be positive numbers"
        )
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise BundleError(f"{where}: values of another width than keys are not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise BundleError(f"{where}: RoPE over a part of the head dimension is not supported")
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
        large = config["num_hidden_layers"] == _GEMMA_27B_LAYERS
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
    """RoPE scaling from the metadata, or from the table of factors that Llama 3 files carry."""
    meta = file.metadata
    if _ROPE_FREQS in file.tensors:
        factors = file.rows(_ROPE_FREQS, slice(None))
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
            raise BundleError(f"{where}: {_ROPE_FREQS} is not one of Llama 3's scalings")
        return scaling
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise BundleError(f"{where}: RoPE scaling {kind!r} is not supported")
    scaling = {"rope_type": kind, "factor": float(meta.get(f"{arch}.rope.scaling.factor", 1.0))}
    if kind == "yarn":
        length = meta.get(f"{arch}.rope.scaling.original_context_length")
        if length is None:
            raise BundleError(f"{where}: yarn needs {arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def llama3_factors(base: float, head_dim: int, scaling: dict[str, Any]) -> F32:
    """What Llama 3 divides each rotary frequency by, (head_dim / 2,)."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    # 1 for short waves, `factor` for long ones, a blend of their inverses between
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    factors: F32 = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    return factors
