"""Bundles of any model type, with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_types.tiny import tiny

from export.bundle import export_bundle
from export.sources.random import PRESETS
from runtime.bundle.store import Bundle
from support.bundles import runnable, settings

_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 64, "truncate": True},
}
# what llama.cpp computes in any case
_IN_LLAMA_CPP: dict[str, dict[str, object]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "olmoe": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": _YARN},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "afmoe": {"mup_enabled": True},
    "qwen3_5": {"linear_key_head_dim": 16, "rms_norm_eps": 1e-6},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
}


def random_bundle(folder: Path, model_type: str, bits: int = 32, **changes: object) -> Bundle:
    """Of a model type with random weights, in so many bits, with settings that llama.cpp has."""
    changes = {**_IN_LLAMA_CPP.get(model_type, {}), **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny-other", tiny(model_type, **changes))
        groups = {} if bits == 32 else {"group_size": 32}
        made = settings("random:tiny-other", folder / "bundle", bits=bits, seq_lens=(64,), **groups)
        return runnable(export_bundle(made).path)
