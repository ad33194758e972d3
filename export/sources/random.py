"""Random weights in the shapes of published models, to measure time and memory, and for tests.

Invariant: a row depends on the seed, the tensor's name and the row's number, not on which rows are
read with it.
"""

from __future__ import annotations

import hashlib
from math import prod, sqrt
from typing import Any

import numpy as np

from export.sources.families import NORM_NEUTRAL, expected_shapes, normalise_config
from export.sources.source import Checkpoint
from export.stored import F32
from runtime.core.errors import UsageError


def _qwen(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv: int
) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip


def _gemma(
    hidden: int, inner: int, layers: int, heads: int, kv: int, window: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": 256, "query_pre_attn_scalar": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "sliding_window": window, "sliding_window_pattern": 6,
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
        **_qwen("qwen3", 1024, 3072, 28, 16, 8),
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    # SmolLM2-135M's shape
    "llama-135m": {
        **_qwen("llama", 576, 1536, 30, 9, 3),
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
    },
    "qwen3-30b-a3b": {
        **_qwen("qwen3_moe", 2048, 6144, 48, 32, 4),
        **_experts(128, 8, 768),
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "gemma3-270m": _gemma(640, 2048, 18, 4, 1, 512),
    "gemma3-1b": _gemma(1152, 6912, 26, 4, 1, 512),
    "gemma3-4b": {
        **_gemma(2560, 10240, 34, 8, 4, 1024),
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "tiny-qwen2": {**_qwen("qwen2", 128, 192, 2, 4, 2), **_TINY},
    "tiny-qwen3": {**_qwen("qwen3", 128, 192, 2, 4, 2), **_TINY, "head_dim": 64},
    "tiny-qwen3-moe": {
        **_qwen("qwen3_moe", 128, 192, 2, 4, 2),
        **_TINY,
        **_experts(8, 2, 256),
        "head_dim": 64,
    },
    "tiny-llama": {
        **_qwen("llama", 128, 192, 2, 4, 2),
        **_TINY,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    # sliding, global, sliding; windows narrower than the shortest sequences that tests use
    "tiny-gemma3": {
        **_gemma(128, 192, 3, 4, 2, 16),
        **_TINY,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 2,
    },
}

_CHUNK_ROWS = 64  # how many rows share a random generator
_MEAN_DRAW = (2**16 - 1) / 2
_PER_STD = sqrt(3 / (2**32 - 1))  # of the sum of four draws
_NORM_STD, _BIAS_STD = 0.05, 0.02


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
        provenance = {"kind": "random", "name": preset, "seed": seed}
        super().__init__(family, config, provenance, expected_shapes(family, config, preset))
        self._seed = seed

    def rows(self, name: str, start: int, stop: int) -> F32:
        shape = self._check_rows(name, start, stop)
        if len(shape) == 1:
            noise = self._noise(name, 0, shape)[start:stop]
            if name.endswith(".bias"):
                return noise * np.float32(_BIAS_STD)
            return noise * np.float32(_NORM_STD) + np.float32(NORM_NEUTRAL.get(self.family, 1.0))
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
