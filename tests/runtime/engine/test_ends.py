"""LoRA on the embedding and the head, against mlx-lm's own layers and autograd."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.lora import with_lora
from support.models import (
    CLOSE,
    adapters_of,
    agree,
    mebp,
    model_of,
    rows_of,
    scored_logits,
)

# tied, tied with a factor after the lookup, and untied
FAMILIES = ("qwen2", "gemma3", "llama")
TARGETS = {
    "ends": ("embed_tokens", "lm_head"),
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "all": ("q_proj", "down_proj", "embed_tokens", "lm_head"),
}


def targets_of(family: str, which: str) -> tuple[str, ...]:
    return tuple(one for one in TARGETS[which] if family == "llama" or one != "lm_head")


@pytest.mark.parametrize(
    ("family", "which"),
    [
        ("qwen2", "all"),
        ("gemma3", "embedding"),
        ("llama", "all"),
        ("llama", "head"),
        ("llama", "embedding"),
    ],
)
@pytest.mark.parametrize("arithmetic", ["unpacked", "packed"])
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, which: str, arithmetic: str
) -> None:
    bundle = with_lora(tiny(family), targets=targets_of(family, which), layers=2)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = model_of(bundle, 32, arithmetic)
    result, found = mebp(model, adapters, rows, tmp_path)
    dense = reference.dense_model(bundle, adapters)
    loss, expected = reference.gradients(dense, [(row.tokens, row.scored) for row in rows])
    assert result.loss_sum / result.scored_tokens == pytest.approx(loss, rel=1e-5)
    agree(found, expected)
    tokens = rows[0].inputs
    logits = mx.array(scored_logits(model, adapters, tokens, np.arange(len(tokens))))
    assert reference.relative_error(logits, dense(mx.array(tokens)[None])[0]) <= CLOSE
