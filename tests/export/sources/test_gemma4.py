"""Our class of Gemma 4 against mlx-lm's own, whose tensors it takes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from model_types.tiny import tiny
from oracles import double
from oracles import whole_model as reference
from support.bundles import Rng

from export.cut.model import cut_model
from export.sources import gemma4
from export.sources.families import normalise_config
from export.sources.sanitize import whole_tensors

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 320},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320},
    **{"sliding_window": 16, "sliding_window_pattern": 3, "num_kv_shared_layers": 3},
}

EXPERTS: dict[str, Any] = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_shared_layers": 0, "final_logit_softcapping": None},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        EXPERTS,
    ],
    ids=str,
)
def test_logits_and_gradients_are_mlx_lms(rng: Rng, changes: dict[str, object]) -> None:
    args = gemma4.ModelArgs(**{**SIZES, **changes})
    theirs, ours = gemma4_text.Model(args), gemma4.Model(args)
    weights = {
        name: mx.array(rng.normal(value.ndim == 1, 0.1, value.shape).astype(np.float32))
        for name, value in tree_flatten(theirs.parameters())
    }
    theirs.load_weights(list(weights.items()))
    ours.load_weights(list(ours.sanitize(weights).items()))
    tokens = mx.array(rng.integers(0, 320, (1, 40)))

    def loss(model: nn.Module) -> mx.array:
        logits = model(tokens)[0]
        return nn.losses.cross_entropy(logits[:-1], tokens[0, 1:]).mean()

    # in float64, since scores without a scale enlarge every rounding
    with double.computing():
        for model in (ours, theirs):
            reference.in_double(model)
        assert mx.allclose(ours(tokens), theirs(tokens), 1e-9, 1e-9)
        found, expected = (
            dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1])) for model in (ours, theirs)
        )
        mx.eval(found, expected)
    for name in expected.keys() & found.keys():
        if "embed_tokens" not in name:
            error = np.linalg.norm(np.array(found[name]) - np.array(expected[name]))
            assert error <= 1e-9 * np.linalg.norm(np.array(expected[name])) + 1e-12, name
    assert expected.keys() - found.keys() == whole_tensors(ours).keys()


def test_experts_are_cut() -> None:
    small = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_kv_shared_layers": 0}
    config = normalise_config(tiny("gemma4_text", **EXPERTS, **small), "x", False)
    blocks = repr(cut_model("gemma4_text", config))
    assert "experts.switch_glu" in blocks
