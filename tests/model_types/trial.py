"""Trying a model type: whether its tiny model is exported, and how far from transformers' it is."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.bundles import runnable, settings
from support.logits import apart, engine_logits
from support.peers import run_script

from export.bundle import export_bundle
from export.cut.model import cut_model
from export.cut.unread import refuse_unread
from export.sources.families import normalise_config, text_config
from export.sources.model_classes import model_module
from model_types.tiny import Settings, changes, family_of, tiny
from runtime.core.errors import BundleError, UsageError

BUCKET = 64


def refusal(model_type: str) -> str | None:
    """Why a type's tiny model cannot be cut; None if it can."""
    try:
        raw = tiny(model_type)
        config = normalise_config(raw, model_type, not raw.get("tie_word_embeddings"))
        cut_model(config["model_type"], config)
    except (BundleError, ValueError) as problem:  # ValueError: of transformers' own class
        return str(problem)
    return None


def accepted(model_type: str) -> Settings:
    """Changes of a type's settings, each of which is not refused beside those before it."""
    found: Settings = {}
    for case in changes(model_type):
        try:
            raw = tiny(model_type, **found, **case)
            config = normalise_config(raw, model_type, not raw.get("tie_word_embeddings"))
            refuse_unread(config["model_type"], config, text_config(raw, model_type), model_type)
            cut_model(config["model_type"], config)
        except (BundleError, ValueError) as problem:
            print(f"{model_type}: {case}: {problem}")
            continue
        found |= case
    return found


def made_elsewhere(
    folder: Path,
    model_types: Sequence[str],
    seed: int,
    changed: bool = True,
    initial: bool = False,
) -> None:
    """Let transformers make checkpoints of types: FOLDER/TYPE, and perhaps FOLDER/TYPE,changed.

    `initial`: with the weights that its classes begin with, in place of drawn ones.
    """
    for model_type in model_types:
        cases: dict[str, Settings] = {model_type: {}}
        if changed:
            cases[f"{model_type},changed"] = accepted(model_type)
        for name, case in cases.items():
            path = folder / name
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(tiny(model_type, **case)))
    run_script(
        ("torch", "transformers"), "transformers_random.py", folder, seed, *["initial"][:initial]
    )


def difference(folder: Path) -> float | str:
    """How far the engine's logits of a checkpoint are from transformers', or who refuses it."""
    if (refused := folder / "refused.txt").exists():
        return f"transformers: {refused.read_text():.300}"
    bundle = folder / "bundle"
    try:
        export_bundle(settings(folder, bundle, bits=32, seq_lens=(BUCKET,), unverified=True))
        tokens, theirs = (np.load(folder / f"{name}.npy") for name in ("tokens", "logits"))
        return apart(engine_logits(runnable(bundle), None, tokens), theirs)
    except (BundleError, UsageError) as problem:
        return f"refused: {problem}"
    finally:
        shutil.rmtree(bundle, ignore_errors=True)


# words of a refusal -> the operation that is missing
_OPERATIONS = {
    "experts with biases": "experts with biases",
    "has experts": "other experts",
    "convolution": "convolutions",
    "ternary": "ternary matrices",
    "a product of its own": "a product for each head",
    "changes its logits": "changed logits",
    "is given no mask": "state spaces, convolutions or linear attention",
    "2 x Embedding": "learned positions",
    "from other tokens": "attention that is not MLX's own",
    "a package that it needs": "a missing package",
}
# parts of the source of a class -> the operation that is missing
_SOURCES = {
    "from .gated_delta import": "the gated delta rule",
    "from .ssm import": "state spaces, convolutions or linear attention",
    "from .mla import": "a product for each head",
    "nn.Conv1d": "convolutions",
    "wkv7": "linear recurrences",
    "rg_lru": "linear recurrences",
    "custom_convolution": "convolutions of keys and values",
    "blocksparse": "blocks of attention",
    "kv_reuse": "keys and values shared across layers",
    "per_layer_input": "embeddings that each layer is given",
    "ngram_embeddings": "embeddings of several tokens",
    "moe_num_experts": "experts",
}
NOT_TRIED = "not tried: no tiny configuration"


def missing(model_type: str, why: str) -> str:
    """The operation that a refusal is for, in a few words; it is looked for in imports at last."""
    if found := next((words for key, words in _OPERATIONS.items() if key in why), None):
        return found
    given = re.search(r"more than its input and a mask \(([\w, ]+)\)", why)
    if given and given[1] != "cache":
        return f"layers that are given more ({given[1]})"
    source = inspect.getsource(model_module(family_of(model_type)))
    if found := next((words for part, words in _SOURCES.items() if part in source), None):
        return found
    if "the model runs" in why:
        return "layers that are run otherwise than one after another"
    if "text model inside" in why or "num_hidden_layers must be" in why:
        return "a model around a text model"
    return "another structure" if "config" not in why else NOT_TRIED
