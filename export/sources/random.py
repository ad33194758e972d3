"""Random weights in the shapes of published models, to measure time and memory, and for tests.

Invariant: a row depends on the seed, the tensor's name and the row's number, not on which rows are
read with it.
"""

from __future__ import annotations

import hashlib
from math import prod, sqrt
from typing import Any

import numpy as np

from export.sources.families import (
    NORM_NEUTRAL,
    build_model,
    normalise_config,
    parameter_shapes,
)
from export.sources.sanitize import usual_origins, whole_tensors
from export.sources.source import Checkpoint
from export.stored import F32
from runtime.adapters.origins import RENAMED
from runtime.core.errors import UsageError


def _shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv: int
) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
    }  # fmt: skip


def _qwen(model_type: str, *sizes: int) -> dict[str, Any]:
    return {
        **_shape(model_type, *sizes), "vocab_size": 151936, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip


def _gemma(window: int, *sizes: int) -> dict[str, Any]:
    return {
        **_shape("gemma3_text", *sizes), "head_dim": 256, "query_pre_attn_scalar": 256,
        "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": window,
        "sliding_window_pattern": 6,
    }  # fmt: skip


def _lfm(full: list[int], hidden: int, inner: int, layers: int, *heads: int) -> dict[str, Any]:
    kinds = ["full_attention" if index in full else "conv" for index in range(layers)]
    return {
        **_shape("lfm2", hidden, inner, layers, *heads), "layer_types": kinds, "conv_L_cache": 3,
        "conv_bias": False, "vocab_size": 65536, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "rope_theta": 1e6, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _qwen35(rule: tuple[int, int, int, int], *sizes: int) -> dict[str, Any]:
    """`rule`: key heads and value heads of the gated delta rule, and the widths of a head."""
    return {
        **_shape("qwen3_5_text", *sizes), "head_dim": 256, "linear_num_key_heads": rule[0],
        "linear_num_value_heads": rule[1], "linear_key_head_dim": rule[2],
        "linear_value_head_dim": rule[3], "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "vocab_size": 248320, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip


def _gemma4(shared: int, hidden: int, inner: int, layers: int, *heads: int) -> dict[str, Any]:
    return {
        **_shape("gemma4_text", hidden, inner, layers, *heads), "head_dim": 256,
        "global_head_dim": 512, "num_kv_shared_layers": shared,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * (layers // 5),
        "sliding_window": 512, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "vocab_size": 262144, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    }  # fmt: skip


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 50272,
        "word_embed_proj_dim": hidden, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }  # fmt: skip


def _experts(count: int, chosen: int, inner: int) -> dict[str, Any]:
    return {
        "num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


_TINY: dict[str, Any] = {"vocab_size": 320, "max_position_embeddings": 1024}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen("qwen2", 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, 16, 2),
    "qwen3-0.6b": {
        **_qwen("qwen3", 1024, 3072, 28, 16, 8), "head_dim": 128, "max_position_embeddings": 40960,
    },
    "llama-135m": {  # SmolLM2-135M's shape
        **_qwen("llama", 576, 1536, 30, 9, 3), "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    },
    "qwen3-30b-a3b": {
        **_qwen("qwen3_moe", 2048, 6144, 48, 32, 4), **_experts(128, 8, 768), "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "gemma3-270m": _gemma(512, 640, 2048, 18, 4, 1),
    "gemma3-1b": _gemma(512, 1152, 6912, 26, 4, 1),
    "gemma3-4b": {
        **_gemma(1024, 2560, 10240, 34, 8, 4), "vocab_size": 262208,
        "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "lfm2-350m": _lfm([2, 5, 8, 10, 12, 14], 1024, 4608, 16, 16, 8),
    "qwen3.5-0.8b": _qwen35((16, 16, 128, 128), 1024, 3584, 24, 8, 2),
    "smollm3-3b": {
        **_shape("smollm3", 2048, 11008, 36, 16, 4),
        "no_rope_layers": [int(index % 4 != 3) for index in range(36)],
        "no_rope_layer_interval": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 5e6, "tie_word_embeddings": True,
    },
    "phi-4-mini": {  # within its original 4,096 tokens, where all factors of longrope are 1
        **_shape("phi3", 3072, 8192, 32, 24, 8), "vocab_size": 200064,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "longrope", "factor": 32.0,
            "short_factor": [1.0] * 48, "long_factor": [1.0] * 48,
        },
    },
    # without state spaces and experts: its MLP is the one that experts share
    "granite-4.0-1b": {
        **_shape("granitemoehybrid", 2048, 4096, 40, 16, 4), "shared_intermediate_size": 4096,
        "layer_types": ["attention"] * 40, "num_local_experts": 0, "num_experts_per_tok": 0,
        "position_embedding_type": "rope", "embedding_multiplier": 12, "logits_scaling": 8,
        "residual_multiplier": 0.22, "attention_multiplier": 1 / 128, "attention_bias": False,
        "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e7, "tie_word_embeddings": True,
    },
    "gemma4-e2b": _gemma4(20, 1536, 6144, 35, 8, 1),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "tiny-qwen2": {**_qwen("qwen2", 128, 192, 2, 4, 2), **_TINY},
    "tiny-qwen3": {**_qwen("qwen3", 128, 192, 2, 4, 2), **_TINY, "head_dim": 64},
    "tiny-qwen3-moe": {
        **_qwen("qwen3_moe", 128, 192, 2, 4, 2), **_TINY, **_experts(8, 2, 256), "head_dim": 64,
    },
    "tiny-llama": {
        **_qwen("llama", 128, 192, 2, 4, 2), **_TINY, "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    "tiny-lfm2": {**_lfm([1], 128, 192, 3, 4, 2), **_TINY, "rope_theta": 1e4},
    "tiny-qwen3_5": {
        **_qwen35((2, 4, 24, 32), 128, 192, 3, 4, 2), **_TINY, "head_dim": 32,
        "full_attention_interval": 2, "rms_norm_eps": 1e-3,
    },
    # two layers with keys and values of their own, and one of each kind that shares them
    "tiny-gemma4": {
        **_gemma4(2, 128, 192, 4, 4, 2), **_TINY, "head_dim": 32, "global_head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 320,
    },
    # sliding, global, sliding; windows narrower than the shortest sequences that tests use
    "tiny-gemma3": {
        **_gemma(16, 128, 192, 3, 4, 2), **_TINY, "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 2,
    },
}  # fmt: skip

_CHUNK_ROWS = 64  # how many rows share a random generator
_MEAN_DRAW = (2**16 - 1) / 2
_PER_STD = sqrt(3 / (2**32 - 1))  # of the sum of four draws
_NORM_STD, _BIAS_STD = 0.05, 0.02
_NORM_SCALES = ("gemma4_text",)  # whose norm of queries scales the scores of attention


class RandomCheckpoint(Checkpoint):
    """Nearly normal weights: matrices of std 1/sqrt(in), norms near scaling by 1, small biases.

    Raises UsageError for an unknown preset.
    """

    def __init__(self, preset: str, seed: int) -> None:
        if preset not in PRESETS:
            raise UsageError(f"there is no preset {preset!r}; choose from {', '.join(PRESETS)}")
        raw = PRESETS[preset]
        untied = raw.get("tie_word_embeddings") is False
        config = normalise_config(raw, preset, has_lm_head=untied)
        family = str(config["model_type"])
        provenance: dict[str, Any] = {"kind": "random", "name": preset, "seed": seed}
        model = build_model(family, config, preset)
        shapes = parameter_shapes(model)
        super().__init__(family, config, provenance, shapes)
        self._seed = seed
        if origins := usual_origins(family, model, shapes):
            provenance[RENAMED] = origins
        self._same: dict[str, str] = {}  # tensors of layers that a checkpoint has once
        for name, (parts, axis) in whole_tensors(model).items():
            self._same |= dict.fromkeys(parts if axis is None else (), name)

    def rows(self, name: str, start: int, stop: int) -> F32:
        shape = self._check_rows(name, start, stop)
        name = self._same.get(name, name)
        if len(shape) == 3:  # a filter for each channel, with a gain of about 1
            return self._noise(name, 0, shape)[start:stop] / np.float32(sqrt(prod(shape[1:])))
        if len(shape) == 1:
            noise = self._noise(name, 0, shape)[start:stop]
            if name.endswith((".A_log", ".dt_bias")):  # states that fade over tens of tokens
                return noise - np.float32(2)
            if name.endswith(".bias"):
                return noise * np.float32(_BIAS_STD)
            values = noise * np.float32(_NORM_STD) + np.float32(NORM_NEUTRAL.get(self.family, 1.0))
            if self.family in _NORM_SCALES and name.endswith("q_norm.weight"):
                values *= np.float32(len(values) ** -0.5)
            return values
        out = np.empty((stop - start, shape[1]), np.float32)
        for first in range(start - start % _CHUNK_ROWS, stop, _CHUNK_ROWS):
            last = min(first + _CHUNK_ROWS, shape[0])
            low, high = max(first, start), min(last, stop)
            noise = self._noise(name, first // _CHUNK_ROWS, (last - first, shape[1]))
            out[low - start : high - start] = noise[low - first : high - first]
        out *= np.float32(1 / sqrt(shape[1]))
        return out

    def tokenizer_files(self) -> dict[str, bytes]:
        return {}

    def _noise(self, name: str, chunk: int, shape: tuple[int, ...]) -> F32:
        """Sums of four draws of 16 bits, of variance 1: of integers, the same on any processor."""
        key = hashlib.blake2b(f"{self._seed}/{name}/{chunk}".encode(), digest_size=16).digest()
        words = np.random.SFC64(int.from_bytes(key, "little")).random_raw(prod(shape))
        draws = np.asarray(words, "<u8").view("<u2").reshape(-1, 4)
        sums = draws.sum(axis=1, dtype=np.int32) - np.int32(4 * _MEAN_DRAW)
        values: F32 = sums.astype(np.float32) * np.float32(_PER_STD)
        return values.reshape(shape)
