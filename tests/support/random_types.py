"""Bundles of any model type, with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_types.tiny import tiny

from export.bundle import export_bundle
from export.sources.random import PRESETS
from runtime.bundle.store import Bundle
from support.bundles import runnable, settings


def random_bundle(folder: Path, model_type: str, **changes: object) -> Bundle:
    """Of a model type with random weights, in float32."""
    changes = {"norm_topk_prob": True, **changes} if model_type == "qwen3_moe" else changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny-other", tiny(model_type, **changes))
        made = settings("random:tiny-other", folder / "bundle", bits=32, seq_lens=(64,))
        return runnable(export_bundle(made).path)
