"""A new model family is an entry in each table of two files of `export`, and nothing elsewhere.

OLMo 2 stands in for any family that mlx-lm implements: it normalizes after attention and after the
MLP, and queries and keys over their whole width, as no family of the tables does.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import runnable, settings
from support.fusing import fused_model, silent
from support.logits import apart, engine_logits, mlx_lm_logits
from support.models import CLOSE, adapters_of, agree, mebp, model_of, rows_of
from support.runs import here, train_arguments
from support.shared import Shared
from support.source_rules import modules, parsed, relative

from export.bundle import export_bundle
from export.fused.checkpoint import write_checkpoint
from export.sources import families, random
from export.sources.open import open_checkpoint
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError

Rng = np.random.Generator
FAMILY, PRESET = "olmo2", "tiny-olmo2"
# the whole of what a family adds: tables of families.py, and a preset of random.py
ENTRIES: list[tuple[dict[str, Any], str, object]] = [
    (families.MODEL_TYPES, FAMILY, "olmo2"),
    (families._CLASSES, FAMILY, "Olmo2ForCausalLM"),
    (families.NORM_NEUTRAL, FAMILY, 1.0),
    (families.FIXED, FAMILY, {"hidden_act": (None, "silu")}),
    (random.PRESETS, PRESET, {**random.PRESETS["tiny-llama"], "model_type": FAMILY}),
]


@pytest.fixture
def bundle(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A tiny random model of the new family, exported; the tables know it during the test."""
    for table, key, value in ENTRIES:
        monkeypatch.setitem(table, key, value)

    def export(path: Path) -> None:
        export_bundle(settings(f"random:{PRESET}", path, seq_lens=(32,)))

    return runnable(shared("a new family", export))


def test_without_its_entries_the_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": FAMILY}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BundleError, match=f"'{FAMILY}' is not supported; supported are gemma3"):
        open_checkpoint(str(tmp_path))


def test_its_gradients_are_autograds(bundle: Bundle, rng: Rng, tmp_path: Path) -> None:
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    loss, gradients = mebp(model_of(bundle, 32), adapters, rows, tmp_path)
    dense = reference.dense_model(bundle, adapters)
    expected_loss, expected = reference.gradients(dense, [(r.tokens, r.scored) for r in rows])
    assert loss.loss_sum / loss.scored_tokens == pytest.approx(expected_loss, rel=CLOSE)
    agree(gradients, expected)


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_it_trains(bundle: Bundle, tmp_path: Path, method: str) -> None:
    run = tmp_path / "run"
    done = here(*train_arguments(bundle.path, run, 2, method=method, budget="600MB"), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["method"], summary["steps"]) == (method, 2)
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]
    scored = ("eval", bundle.path, "--data=random:5", "--max-seq-length=24", "--json")
    losses = [
        json.loads(here(*scored, *more).stdout)["loss"] for more in ([], [f"--adapter={run}"])
    ]
    assert losses[0] != losses[1]


def test_mlx_lm_reads_what_is_fused(bundle: Bundle, rng: Rng, tmp_path: Path) -> None:
    adapters = adapters_of(bundle, rng)
    tokens = rng.integers(0, bundle.manifest.vocab_size, 30)
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "hf", "float32", 1 << 40, False, silent)
    expected = engine_logits(bundle, adapters, tokens)
    assert apart(mlx_lm_logits(tmp_path / "hf", tokens), expected) < CLOSE


def test_no_family_is_named_outside_of_export() -> None:
    for path in modules("runtime", "harness", "ondevice"):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Constant):
                where = f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
                assert node.value not in families.MODEL_TYPES, where
