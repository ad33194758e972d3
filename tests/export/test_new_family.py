"""A dense decoder of mlx-lm that no file names: exported, trained with both methods, and fused.

Granite multiplies by constants, the logits among them; OLMo 2 norms after the block, and the whole
width of queries and keys; Phi-3 has one matrix for queries, keys and values; SmolLM3 has a layer
without positions; Gemma 2 caps scores and logits; the head of Phi has a bias; GPT-2 learns
positions.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from model_types.tiny import tiny
from oracles import whole_model as reference
from oracles.estimators import MonolithicMeZO
from oracles.whole_model_full import MonolithicFullMeZO
from support.bundles import runnable, settings
from support.checkpoints import is_refused, weights_of, write_folder
from support.estimators import copy_of, mezo_of
from support.full_weights import EPSILON, method_of
from support.full_weights import weights_of as full_weights_of
from support.fusing import fused_model, silent
from support.generation import dense_logits
from support.logits import apart, engine_logits, mlx_lm_logits
from support.models import (
    CLOSE,
    FAMILIES,
    adapters_of,
    check_gradients,
    model_of,
    packed_of,
    row_of,
    rows_of,
)
from support.runs import here, json_of, train_arguments
from support.shared import Shared
from support.source_rules import modules, parsed, relative

from export.bundle import export_bundle
from export.cut.unread import refuse_unread
from export.fused.checkpoint import write_checkpoint
from export.sources.families import normalise_config
from export.sources.random import PRESETS
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, UsageError
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.noise import Noise
from runtime.run.budget import plan_decoding
from runtime.run.decoder import Decoder
from runtime.run.session import open_session

Rng = np.random.Generator
BUCKET = 32
# settings that mlx-lm's own class computes with, too, and sizes that groups of 32 divide
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {"activation_function": "gelu"},
    "minicpm3": {"q_lora_rank": 32, "kv_lora_rank": 32},
    "nanochat": {"rms_norm_eps": 1e-5},
}
# why mlx-lm's own loader has no such model
ELSEWHERE = {
    "glm": "mlx-lm turns whole heads, whatever partial_rotary_factor says",
    "muse_glimmer": "a fused checkpoint of it is refused by name",
    "opt": "mlx-lm has no class for it",
}
SLOW = ("gptj", "muse_glimmer", "qwen2_vl", "gpt_bigcode", "apertus", "glm", "minicpm3", "exaone")
SLOW += ("ministral3", "nanochat", "opt", "granite", "olmo2", "smollm3", "phi")
TYPES = (
    *("phi3", "gemma2", "gpt2"),  # fused matrices, caps, learned positions
    *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW),
)


def written(folder: Path, model_type: str, **changes: Any) -> Path:
    """A checkpoint with random weights; its configuration is as transformers writes it."""
    raw = tiny(model_type, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "of this type", raw)
        _, arrays = weights_of("of this type")
    return write_folder(folder, raw, arrays)


@pytest.fixture(params=TYPES)
def bundle(shared: Shared, request: pytest.FixtureRequest) -> Bundle:
    def export(path: Path) -> None:
        changes = CHANGES.get(request.param, {})
        folder = written(path.with_suffix(".hf"), request.param, **changes)
        export_bundle(settings(folder, path, seq_lens=(BUCKET,), group_size=32))

    return runnable(shared(f"a tiny {request.param}", export))


def test_its_logits_gradients_and_losses_are_the_dense_models(
    bundle: Bundle, rng: Rng, tmp_path: Path
) -> None:
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = model_of(bundle, BUCKET)
    dense = reference.dense_model(bundle, adapters)
    tokens = rows[0].inputs
    logits = np.array(dense(mx.array(tokens)[None])[0])
    assert apart(engine_logits(bundle, adapters, tokens), logits) < CLOSE
    check_gradients(dense, model, adapters, rows, tmp_path)
    packed = packed_of(bundle, rng, BUCKET - 3, 15)  # whose rows do not see each other
    # there positions go on from row to row, and round otherwise
    check_gradients(dense, model, adapters, [packed], tmp_path, bound=5 * CLOSE)

    oracle = MonolithicMeZO(copy_of(adapters), Noise(1), 1e-3, 1, 0.0)
    method = mezo_of(model, adapters, tmp_path, 1, len(rows), lanes=2)
    mean, slopes = oracle.step(model, rows, 0, 1e-2)
    result = method.step(0, 1e-2, [rows])
    assert result.record == [1e-2, slopes]
    assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(mean, rel=1e-12)
    assert mean == pytest.approx(reference.plain_loss(model, adapters, rows), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gemma2"])
def test_all_its_parameters_are_trained_as_by_the_monolithic_algorithm(
    rng: Rng, seed: int, tmp_path: Path, model_type: str
) -> None:
    """Positions, which start again in packed rows, and a bias of the head are parameters too."""
    folder = written(tmp_path / "hf", model_type)
    arguments = settings(
        folder, tmp_path / "b", seq_lens=(16,), trainable="full", storage="float32"
    )
    bundle = runnable(export_bundle(arguments).path)
    bundle = bundle.with_lora(msgspec.structs.replace(bundle.manifest.lora, targets=()))
    weights = full_weights_of(bundle, tmp_path / "slots", seed)
    model = model_of(bundle, 16, weights=weights)
    oracle = MonolithicFullMeZO(bundle, RowNoise(Noise(seed, "gaussian")), EPSILON, 1, 0.1)
    method = method_of(model, weights, tmp_path, 2, weight_decay=0.1)
    for step in range(2):
        rows = [row_of(bundle, rng, 9), packed_of(bundle, rng, 16, 5)]
        loss, slopes = oracle.step(model, rows, step, 1e-2)
        result = method.step(step, 1e-2, [rows[:1], rows[1:]])
        assert result.record == [1e-2, slopes]
        assert result.loss.loss_sum / result.loss.scored_tokens == pytest.approx(loss, rel=1e-12)
    assert {"gpt2": "model.wpe", "phi": "lm_head.bias"}.get(model_type, "model.norm.weight") in {
        *oracle.theta
    }
    for name, expected in oracle.theta.items():
        rows_, columns, _ = weights.tensors[weights.owner[name]][name]
        found = np.empty((rows_, columns), np.float32)
        weights._fill(name, 0, rows_, found)
        assert (found == expected).all(), name


def test_what_decodes_continues_the_whole(bundle: Bundle, rng: Rng) -> None:
    adapters = adapters_of(bundle, rng)
    tokens = [int(one) for one in rng.integers(0, bundle.manifest.vocab_size, 40)]
    expected = dense_logits(bundle, adapters, tokens)
    decoder = Decoder(open_session(bundle, plan_decoding(bundle, 10**9, 64)), adapters)
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        found = decoder.read(tokens[start:stop])
        assert apart(found, expected[stop - 1]) < CLOSE


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_it_trains(bundle: Bundle, tmp_path: Path, method: str) -> None:
    run = tmp_path / "run"
    summary = json_of(*train_arguments(bundle.path, run, 2, method=method, budget="600MB"), by=here)
    assert (summary["method"], summary["steps"]) == (method, 2)
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]


def test_mlx_lm_reads_what_is_fused(bundle: Bundle, rng: Rng, tmp_path: Path) -> None:
    if why := ELSEWHERE.get(bundle.manifest.family):
        pytest.skip(why)
    adapters = adapters_of(bundle, rng)
    windows = bundle.manifest.family == "gemma2"  # which mlx-lm passes over
    tokens = rng.integers(0, bundle.manifest.vocab_size, 16 if windows else 30)
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "hf", "float32", 1 << 40, False, silent)
    expected = engine_logits(bundle, adapters, tokens)
    assert apart(mlx_lm_logits(tmp_path / "hf", tokens), expected) < CLOSE


# --- what is refused --------------------------------------------------------------------------


def test_a_type_that_was_not_compared_runs_only_if_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", "internlm2")
    with pytest.raises(UsageError, match=r"'internlm2' has not been compared .* add --unverified"):
        export_bundle(settings(folder, tmp_path / "bundle"))
    said = export_bundle(settings(folder, tmp_path / "bundle", unverified=True, group_size=32))
    assert "has not been compared" in str(said.manifest.provenance)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_window = 16: mlx-lm's llama does not"),
        ("phi3", {"sliding_window": 16}, "sliding_window = 16"),
        ("granite", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (
            "smollm3",
            {"sliding_window": 16, "use_sliding_window": True},
            "use_sliding_window = True",
        ),
        ("mistral", {"sliding_window": 256}, None),
        ("mistral", {"sliding_window": None}, None),
    ],
)
def test_a_setting_that_the_class_does_not_read_is_refused(
    model_type: str, changes: dict[str, Any], said: str | None
) -> None:
    raw = tiny(model_type, **changes)
    config = normalise_config(raw, "x", not raw["tie_word_embeddings"])
    if said is None:
        refuse_unread(config["model_type"], config, raw, "x")
        return
    with pytest.raises(BundleError, match=said):
        refuse_unread(config["model_type"], config, raw, "x")


@pytest.mark.parametrize("model_type", ["no_such_model", "../llama", "os", "base", None, "olmo"])
def test_what_is_no_class_of_mlx_lm_is_refused_by_name(tmp_path: Path, model_type: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "model.safetensors").touch()
    reasons = "( is not supported|: a package| and names no architecture)"
    is_refused(tmp_path, f"{model_type}'?{reasons}")


def test_no_family_is_named_outside_of_export() -> None:
    for path in modules("runtime", "harness", "ondevice"):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Constant):
                named = node.value in (*FAMILIES, "qwen3", "gemma3_text")
                assert not named, f"{relative(path)}:{node.lineno}: {node.value!r}"
