"""Whole models over a configuration's settings: transformers' logits and losses, or a refusal.

Tiny models with random weights, in float32, exported and run. transformers runs in an interpreter
of its own, and the test is skipped without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from support.bundles import runnable, settings
from support.checkpoints import weights_of, write_folder
from support.gguf_files import write_gguf
from support.logits import apart, engine_logits, exact_factor
from support.models import each_family, model_of
from support.peers import LLAMA, run_script
from support.rotary import Rng, settings_of, some

from export.bundle import export_bundle
from export.cut.unread import refuse_unread
from export.sources.families import (
    NORM_NEUTRAL,
    check_lengths,
    expected_shapes,
    normalise_config,
)
from export.sources.gguf_config import llama3_factors
from export.sources.random import PRESETS
from export.sources.settings import unknown_settings
from runtime.bundle.positions import longest_sequence
from runtime.core.errors import BundleError, UsageError
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.objectives.next_token import NextToken
from runtime.run.evaluate import evaluate

CLOSE = 1e-5
TOKENS, BUCKET = 96, 128  # longer than Gemma's window and the original length below
Settings = dict[str, Any]


def rope(kind: str, **scaling: Any) -> Settings:
    return {"rope_scaling": {"rope_type": kind, **scaling}}


LENGTH = {"original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BOTH = ["sliding_attention", "full_attention"]

# settings of every family; those in the second table are refused
COMPUTED: dict[str, Settings] = {
    "nothing": {},
    "linear": rope("linear", factor=3.0),
    "llama3": rope("llama3", **LLAMA3, **LENGTH),
    "llama3 without a length": rope("llama3", **LLAMA3),
    "yarn": rope("yarn", factor=4.0, **LENGTH),
    "yarn without a length": rope("yarn", factor=4.0),
    "yarn, factor null": rope("yarn", factor=None, **LENGTH),
    "yarn, mscale alone": rope("yarn", factor=4.0, **LENGTH, mscale=0.7),
    "yarn, both mscales": rope("yarn", factor=4.0, **LENGTH, mscale=0.7, mscale_all_dim=1.3),
    "yarn, attention_factor": rope("yarn", factor=4.0, **LENGTH, attention_factor=0.8),
    "yarn, betas": rope("yarn", factor=4.0, **LENGTH, beta_fast=16, beta_slow=2.0),
    "base": {"rope_theta": 5e5},
    "epsilon": {"rms_norm_eps": 0.3},
    "a key-value head for each": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
}
TRUNCATE: dict[str, Settings] = {
    "yarn, truncate": rope("yarn", factor=4.0, **LENGTH, truncate=False),
    "yarn, truncate null": rope("yarn", factor=4.0, **LENGTH, truncate=None),
}
REFUSED_BY_ALL: dict[str, Settings] = {
    "dynamic": rope("dynamic", factor=4.0),
    "proportional": rope("proportional", factor=4.0, partial_rotary_factor=0.5),
    "partial, in the scaling": rope("yarn", factor=4.0, partial_rotary_factor=0.5),
    "partial": {"partial_rotary_factor": 0.5},
    "neighbours turned": {"rope_traditional": True},
    "tokens after it seen": {"is_causal": False},
    "layers of their own": {"per_layer_config": {"0": {"intermediate_size": 64}}},
    "attention_multiplier": {"attention_multiplier": 0.5},
    "logits_scaling": {"logits_scaling": 8.0},
    "residual_multiplier": {"residual_multiplier": 0.5},
    "clip_qkv": {"clip_qkv": 3.0},
    "use_qk_norm": {"use_qk_norm": True},
}
MISSING = object()


def left_out(*names: str) -> Settings:
    return dict.fromkeys(names, MISSING)


BASES = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
QWEN: dict[str, Settings] = {
    "left out": left_out(*BASES),
    "a window that is off": {"sliding_window": 16, "max_window_layers": 0},
    "a window in later layers": {"use_sliding_window": True, "sliding_window": 16},
    "a window as long as any sequence": {
        **{"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0}
    },
}
QWEN_REFUSED: dict[str, Settings] = {
    "a window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "a window by type": {"use_sliding_window": True, "sliding_window": 16, "layer_types": BOTH},
    "attention_bias": {"attention_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
LINEAR = {"rope_type": "linear", "factor": 3.0}
OWN: dict[str, tuple[dict[str, Settings], dict[str, Settings]]] = {
    "qwen2": (QWEN, {**QWEN_REFUSED, "head_dim": {"head_dim": 64}}),
    "qwen3": ({**QWEN, "head_dim": {"head_dim": 128}}, QWEN_REFUSED),
    "llama": (
        {
            "left out": left_out(*BASES, "num_key_value_heads"),
            "attention_bias": {"attention_bias": True},
            "mlp_bias": {"mlp_bias": True},
            "head_dim": {"head_dim": 64},
            "head_dim null": {"head_dim": None},
            "a window that is off": {"sliding_window": 16, "use_sliding_window": False},
            "a window of no layer": {"sliding_window": 16, "layer_types": ["full_attention"] * 2},
            "a window as long as any sequence": {"sliding_window": 1024, "layer_types": BOTH},
        },
        {
            "a window": {"sliding_window": 16},
            "a window by type": {"sliding_window": 16, "layer_types": BOTH},
            "hidden_act": {"hidden_act": "gelu"},
        },
    ),
    "gemma3": (
        {
            "left out": left_out(
                *(*BASES, "rope_local_base_freq", "sliding_window", "sliding_window_pattern"),
                *("num_attention_heads", "num_key_value_heads", "head_dim"),
                "query_pre_attn_scalar",
            )
            | {"num_hidden_layers": 6},
            "sliding_window": {"sliding_window": 5},
            "query_pre_attn_scalar": {"query_pre_attn_scalar": 77},
            "rope_local_base_freq": {"rope_local_base_freq": 500.0},
            "all global": {"layer_types": ["full_attention"] * 3},
            "a pattern that is written": {"_sliding_window_pattern": 2},
            "types against a pattern": {
                "_sliding_window_pattern": 6,
                "sliding_window_pattern": MISSING,
                "layer_types": [*BOTH, "sliding_attention"],
            },
            "nested": {"rope_parameters": {**NESTED, "sliding_attention": {"rope_theta": 2e4}}},
            "nested, with a scaling beside": {"rope_parameters": NESTED, "rope_scaling": LINEAR},
            "nested scaling": {"rope_parameters": {"full_attention": LINEAR}},
            "an outer length": {**rope("yarn", factor=4.0), **LENGTH},
        },
        {
            "types without a rule": {"layer_types": [*BOTH, "full_attention"]},
            "a pattern that is not read": {
                "_sliding_window_pattern": 2,
                "sliding_window_pattern": MISSING,
            },
            "no window": {"sliding_window": None},
            "all sliding": {"layer_types": ["sliding_attention"] * 3},
            "attention_bias": {"attention_bias": True},
            "hidden_activation": {"hidden_activation": "silu"},
            "final_logit_softcapping": {"final_logit_softcapping": 30.0},
            "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
            "use_bidirectional_attention": {"use_bidirectional_attention": True},
            "flat rope_parameters": {"rope_parameters": LINEAR},
            "scaled sliding layers": {"rope_parameters": {"sliding_attention": LINEAR}},
            **TRUNCATE,  # transformers does not read it inside of a type of layers
        },
    ),
}
FACTORS = {"short_factor": (1.0, 0.1), "long_factor": (2.0, 0.2)}  # the first, and what is added


def with_vision_tower(text: Settings) -> Settings:
    """In place of all other settings: transformers gives the tower random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    images = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return {
        **left_out(*text),
        "model_type": "gemma3",
        "text_config": {**text, "rope_scaling": LINEAR},
        "vision_config": {"model_type": "siglip_vision_model", **sizes, **images},
        "mm_tokens_per_image": 4,
        "image_token_index": 1000,
    }


def unequal_factors(dims: int) -> Settings:
    made = ([first + step * i for i in range(dims // 2)] for first, step in FACTORS.values())
    return dict(zip(FACTORS, made, strict=True))


def longropes(dims: int) -> dict[str, Settings]:
    unequal = unequal_factors(dims)
    equal = {**dict.fromkeys(unequal, unequal["short_factor"]), **LENGTH}
    return {
        "longrope, equal factors": rope("longrope", **equal),
        "longrope, attention_factor": rope("longrope", **equal, attention_factor=1.7),
        "longrope, factor": rope("longrope", **equal, factor=3.0),
        "longrope without a length": rope("longrope", **unequal),
        "longrope below its length": {
            **rope("longrope", **unequal, **LENGTH, factor=16.0),
            "max_position_embeddings": 64,
        },
    }


MADE = 40
NO_SILU = ("gelu", "relu", "swish", "gelu_pytorch_tanh")


def anything(rng: Rng, family: str) -> Settings:
    """Random values of a random part of all settings, of which each family refuses some."""
    layers = PRESETS[f"tiny-{family}"]["num_hidden_layers"]

    def types() -> list[str]:
        names = ["sliding_attention", "full_attention"]
        return [names[int(rng.random() < 0.7)] for _ in range(layers)]

    def coin() -> bool:
        return bool(rng.random() < 0.5)

    windows = {
        "sliding_window": int(rng.choice([5, 16, 48, 96, 2000])),
        "layer_types": types() if rng.random() < 0.3 else None,
    }
    qwen = {**windows, "use_sliding_window": coin(), "max_window_layers": int(rng.integers(0, 4))}
    own: dict[str, Settings] = {
        "qwen2": qwen,
        "qwen3": {**qwen, "head_dim": int(rng.choice([32, 48, 64]))},
        "llama": {
            **{"attention_bias": coin(), "mlp_bias": coin(), "pretraining_tp": 2},
            "head_dim": int(rng.choice([16, 32, 48])),
        },
        "gemma3": {
            **windows,
            "head_dim": int(rng.choice([32, 64])),
            "query_pre_attn_scalar": int(rng.integers(1, 300)),
            "sliding_window_pattern": int(rng.integers(1, 5)),
        },
    }
    usual = {
        "num_key_value_heads": int(rng.choice([1, 2, 4])),
        "rms_norm_eps": float(10 ** rng.uniform(-6, 0)),
        "max_position_embeddings": int(rng.choice([64, 500, 131072])),
        "tie_word_embeddings": coin(),
        "intermediate_size": int(rng.choice([64, 160])),
        "attention_dropout": float(rng.random()),
        "initializer_range": 0.1,
        "use_cache": coin(),
        "pad_token_id": 7,
        **own[family],
    }
    odd = {
        "hidden_act": str(rng.choice(NO_SILU)),
        "hidden_activation": str(rng.choice(NO_SILU)),
        "attention_bias": True,
        "is_causal": False,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 3.0,
        "use_bidirectional_attention": True,
    }
    chosen = some(rng, **usual) | {k: v for k, v in odd.items() if rng.random() < 0.03}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    return chosen | positions(rng, family, dims_of(PRESETS[f"tiny-{family}"] | chosen))


def positions(rng: Rng, family: str, dims: int) -> Settings:
    """Random settings of positions, under the names of transformers 4 or 5."""

    def scaling() -> Settings:
        kinds = ["default", "default", "linear", "llama3", "yarn", "longrope", "dynamic"]
        kind = str(rng.choice(kinds))
        found = {"rope_type": kind}
        if kind == "dynamic":
            found["factor"] = 2.0
        elif kind != "default":
            found |= settings_of(kind, rng, dims)
        if kind == "longrope" and rng.random() < 0.5:
            found["long_factor"] = rng.uniform(1, 4, dims // 2).tolist()
        return found | some(rng, rope_theta=float(10 ** rng.uniform(3, 7)))

    if rng.random() < 0.3:
        base = {"rope_theta": float(10 ** rng.uniform(3, 7))}
        return {**base, "rope_scaling": scaling()}
    if family != "gemma3":
        return {"rope_parameters": scaling()}
    local = {"rope_type": "default"} if rng.random() < 0.8 else scaling()
    return {"rope_parameters": {"full_attention": scaling(), "sliding_attention": local}}


def names_in(value: Any) -> set[str]:
    """The keys of settings, at any depth, and the type of positions."""
    if not isinstance(value, dict):
        return set()
    kind = {str(value["rope_type"])} if "rope_type" in value else set()
    return ({*value} | kind - {"default"}).union(*map(names_in, value.values())) - {"factor"}


def configured(preset: Settings, changes: Settings) -> Settings:
    return {key: value for key, value in {**preset, **changes}.items() if value is not MISSING}


def dims_of(raw: Settings) -> int:
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def write_model(folder: Path, raw: Settings, rng: Rng) -> None:
    """A checkpoint with random weights, of the text model alone."""
    tied = bool(raw.get("tie_word_embeddings", "gemma" in raw["model_type"]))
    config = normalise_config(raw, "x", not tied)
    family = config["model_type"]
    arrays = {}
    for name, shape in expected_shapes(family, config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            arrays[name] = noise / np.float32(shape[1] ** 0.5)
        else:
            neutral = NORM_NEUTRAL.get(family, 1.0) if name.endswith("norm.weight") else 0.0
            arrays[name] = np.float32(neutral) + noise / 10
    prefix = "language_model." if "text_config" in raw else ""
    write_folder(folder, raw, {prefix + name: array for name, array in arrays.items()})
    tokens = min(TOKENS, config["max_position_embeddings"])
    np.save(folder / "tokens.npy", rng.integers(0, config["vocab_size"], tokens))


def mean_loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """The mean cross entropy of the tokens after the first, of logits (T, V)."""
    rows = logits[:-1].astype(np.float64)
    largest = rows.max(axis=1)
    total = largest + np.log(np.exp(rows - largest[:, None]).sum(axis=1))
    return float((total - rows[np.arange(len(rows)), tokens[1:]]).mean())


def exported(folder: Path, source: str = "", exact: bool = False) -> tuple[np.ndarray, float]:
    """The logits and the loss of the checkpoint in a folder, or of a file there.

    They are of the tokens beside it, and the engine's loss is that of an evaluation.

    `exact`: with the factor of Gemma's embedding as it is, and not rounded as mlx-lm rounds it; the
    loss is then that of the logits.
    """
    tokens = np.load(folder / "tokens.npy")
    bucket = min(BUCKET, max(len(tokens), 64))
    export_bundle(settings(folder / source, folder / "bundle", bits=32, seq_lens=(bucket,)))
    bundle = runnable(folder / "bundle")
    if exact:
        logits = engine_logits(bundle, None, tokens, exact_factor(bundle))
        return logits, mean_loss(logits, tokens)
    logits = engine_logits(bundle, None, tokens)
    rows = [Row(tokens.astype(np.int32), np.arange(len(tokens) - 1))]
    model, adapters = model_of(bundle, bucket), Adapters.initial(bundle.manifest, 0)
    ((total,),) = evaluate(model, adapters, rows, [NextToken()])
    return logits, total / (len(tokens) - 1)


def cases(family: str) -> tuple[dict[str, Settings], dict[str, Settings]]:
    """The settings that a family is computed with, and those that it is refused with."""
    computed, refused = (
        {**shared, **own}
        for shared, own in zip((COMPUTED, REFUSED_BY_ALL), OWN[family], strict=True)
    )
    computed |= longropes(dims_of(PRESETS[f"tiny-{family}"]))
    return (computed if family == "gemma3" else computed | TRUNCATE), refused


@each_family
def test_each_setting_is_read_or_refused_by_name(family: str) -> None:
    def read(changes: Settings, traced: bool) -> None:
        raw = configured(PRESETS[f"tiny-{family}"], changes)
        config = normalise_config(raw, "x", has_lm_head=False)
        unknown = unknown_settings(config["model_type"], raw, "x")
        if traced:
            refuse_unread(config["model_type"], config, raw, "x")
        assert not unknown or changes.keys() & LENGTH

    computed, refused = cases(family)
    for name, changes in computed.items():
        read(changes, traced=name in OWN[family][0])
    for name, changes in refused.items():
        with pytest.raises(BundleError, match=refusal(changes)) as caught:
            read(changes, traced=True)
        print(f"{family} | {name} | {caught.value}")


SHORT = {"max_position_embeddings": 64}
FAR = (
    "original_max_position_embeddings = 64 can be computed up to .*; give --seq-lens of at most 64"
)
WIDE = r"sliding_window = {}.* or, to .*\(now 64\) and --seq-lens \(now 81\) to at most its width"
WITHIN: dict[str, tuple[str, str, Settings]] = {  # family, what is said
    "longrope": ("llama", FAR, rope("longrope", **unequal_factors(32), **LENGTH)),
    "a window by type": (
        *("qwen3", WIDE.format(64)),
        {**SHORT, "use_sliding_window": True, "sliding_window": 64, "layer_types": BOTH},
    ),
    "a wider window": (
        *("llama", WIDE.format(80)),
        {**SHORT, "sliding_window": 80, "layer_types": BOTH},
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_lengths_at_which_a_setting_computes_otherwise_are_refused(
    tmp_path: Path, rng: Rng, name: str
) -> None:
    family, said, changes = WITHIN[name]
    raw = configured(PRESETS[f"tiny-{family}"], changes)
    config = normalise_config(raw, "x", has_lm_head=False)
    check_lengths(config, (16, 64))
    refuse_unread(config["model_type"], config, raw, "x", (16, 64))
    write_model(tmp_path, raw, rng)
    assert longest_sequence(config) == 64
    with pytest.raises((UsageError, BundleError), match=said):
        export_bundle(settings(tmp_path, tmp_path / "b", seq_lens=(64, 81)))
    assert not (tmp_path / "b").exists()
    plain = normalise_config(PRESETS[f"tiny-{family}"] | SHORT, "x", has_lm_head=False)
    check_lengths(plain, (1024,))


@pytest.mark.slow
@each_family
def test_each_setting_that_is_read_is_computed_as_in_transformers(
    tmp_path: Path, rng: Rng, family: str
) -> None:
    preset = PRESETS[f"tiny-{family}"]
    computed, _ = cases(family)
    if family == "gemma3":
        computed["around it a vision tower"] = with_vision_tower(preset)
    ours = {}
    for name, changes in computed.items():
        folder = tmp_path / name
        write_model(folder, configured(preset, changes), rng)
        ours[name] = exported(folder)
    run_script(("torch", "transformers"), "transformers_logits.py", tmp_path)
    assert not dict(differences(tmp_path, ours, family, CLOSE))


@pytest.mark.slow
@each_family
def test_models_that_transformers_makes_are_computed_as_there_or_refused_by_name(
    tmp_path: Path, rng: Rng, family: str
) -> None:
    preset, drawn = PRESETS[f"tiny-{family}"], {}
    for number in range(MADE):
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn[folder] = anything(rng, family)
        raw = {**preset, **drawn[folder], "seed": number}
        (folder / "settings.json").write_text(json.dumps(raw))
        np.save(folder / "tokens.npy", rng.integers(0, 320, int(rng.choice([48, 64, 96]))))
    run_script(("torch", "transformers"), "transformers_logits.py", tmp_path)
    ours = {}
    for folder, changes in drawn.items():
        if (problem := folder / "refused.txt").exists():
            print(f"{family} | {folder.name} | in transformers: {problem.read_text()}")
            continue
        try:
            ours[folder.name] = exported(folder)
        except (BundleError, UsageError) as refused:
            print(f"{family} | {folder.name} | {str(refused).removeprefix(str(tmp_path))}")
            faults = {*names_in(changes), ".bias"}  # tensors of a setting that is not read
            assert any(key in str(refused) for key in faults), changes
    assert len(ours) > MADE // 4
    assert not dict(differences(tmp_path, ours, family, CLOSE))


def refusal(changes: Settings) -> str:
    """What a refusal of these settings has to say."""
    named = {*changes, *(changes.get("rope_scaling") or {})} - {"rope_type", "factor"}
    return (
        f"({'|'.join(sorted(named | {str((changes.get('rope_scaling') or {}).get('rope_type'))}))})"
    )


def differences(
    folder: Path, ours: dict[str, tuple[np.ndarray, float]], family: str, close: float
) -> Iterator[tuple[str, Any]]:
    """The cases that are further apart than they may be, each printed."""
    for name, (found, loss) in ours.items():
        if (problem := folder / name / "refused.txt").exists():
            yield name, problem.read_text()
            continue
        logits, tokens = (np.load(folder / name / f"{part}.npy") for part in ("logits", "tokens"))
        own = folder / name / "loss.npy"
        theirs = float(np.load(own)) if own.exists() else mean_loss(logits, tokens)
        apart_by, of_loss = apart(found, logits), abs(loss / theirs - 1)
        print(f"{family} | {name} | {apart_by:.1e} | {theirs:.6f} | {of_loss:.1e}")
        if max(apart_by, of_loss) > close:
            yield name, (apart_by, of_loss)


# --- GGUF files -------------------------------------------------------------------------------

HEAD = object()  # the numbers of a head
BASE = {"tokenizer.ggml.model": "no_vocab", "arch.vocab_size": 320}


def scaling(kind: str | None = None, **entries: Any) -> Settings:
    """Entries of a file that say how positions are scaled."""
    given = entries if kind is None else {"type": kind, **entries}
    return {f"arch.rope.scaling.{name}": value for name, value in given.items()}


ORIGINAL = {"original_context_length": 64}
FAST = {"yarn_beta_fast": 32.0}
ONES = ("yarn_beta_slow", "attn_factor", "yarn_ext_factor", "yarn_attn_factor")
NEUTRAL = {**FAST, **dict.fromkeys(ONES, 1.0)}
LENGTHS_OF_A_HEAD = (
    *("attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
)
ENTRIES: dict[str, Settings] = {
    "nothing": {},
    "no rope.freq_base": {"arch.rope.freq_base": None},
    "rope.freq_base": {"arch.rope.freq_base": 5e5},
    "attention.layer_norm_rms_epsilon": {"arch.attention.layer_norm_rms_epsilon": 0.3},
    "rope.scaling.factor alone": scaling(factor=3.0),
    "rope.scaling.factor of none": scaling("none", factor=3.0),
    "rope.scale_linear": {"arch.rope.scale_linear": 3.0},
    "linear": scaling("linear", factor=3.0),
    "yarn": scaling("yarn", factor=4.0, **ORIGINAL),
    "yarn without a length": scaling("yarn", factor=4.0),
    "yarn without a factor": scaling("yarn", **ORIGINAL),
    "yarn, scale_linear": {"arch.rope.scale_linear": 4.0, **scaling("yarn", **ORIGINAL)},
    "yarn, neutral entries": scaling("yarn", factor=4.0, **ORIGINAL, **NEUTRAL),
    "linear, neutral entries": scaling(factor=3.0, **ORIGINAL, yarn_ext_factor=1.0, **FAST),
    "a longer context": {"arch.context_length": 131072, **scaling("yarn", factor=4.0)},
    "lengths of a head": {f"arch.{name}": HEAD for name in LENGTHS_OF_A_HEAD},
    "neutral entries": {
        **scaling(attn_factor=1.0, yarn_beta_fast=32.0, finetuned=True),
        **{"arch.logit_scale": 1.0, "arch.attention.causal": True, "arch.pooling_type": 0},
        **{"arch.expert_count": 0, "arch.attention.layer_norm_epsilon": 0.3},
        "general.sampling.temp": 0.5,
    },
}
PATTERN = "arch.attention.sliding_window_pattern"
OF_GEMMA: dict[str, Settings] = {
    "no window": {"arch.attention.sliding_window": None},
    "sliding_window": {"arch.attention.sliding_window": 5},
    "sliding_window_pattern": {PATTERN: 3},
    "sliding_window_pattern by layer": {PATTERN: [True, False, True]},
    "rope.freq_base_swa": {"arch.rope.freq_base_swa": 500.0},
}


def of_llama(config: Settings) -> dict[str, Settings]:
    """Llama 3's table of factors, with the base that stands in a file."""
    published = {**LLAMA3, "original_max_position_embeddings": 8192}
    base = float(config["rope_theta"])
    return {"rope_freqs": {"rope_freqs.weight": llama3_factors(base, dims_of(config), published)}}


@pytest.mark.slow
@each_family
def test_each_entry_of_a_gguf_file_is_computed_as_in_llama_cpp(
    tmp_path: Path, rng: Rng, family: str
) -> None:
    config, arrays = weights_of(f"tiny-{family}")
    own = {"gemma3": OF_GEMMA, "llama": of_llama(config)}.get(family, {})
    ours = {}
    for name, entries in {**ENTRIES, **own}.items():
        folder = tmp_path / name
        folder.mkdir()
        entries = {k: dims_of(config) if v is HEAD else v for k, v in entries.items()}
        float32 = GGMLQuantizationType.F32
        write_gguf(folder / "model.gguf", config, arrays, BASE | entries, stored_as=float32)
        np.save(folder / "tokens.npy", rng.integers(0, config["vocab_size"], TOKENS))
        ours[name] = exported(folder, "model.gguf", exact=True)
    run_script(LLAMA, "llama_logits.py", tmp_path)
    # llama.cpp's GELU is a table of float16
    assert not dict(differences(tmp_path, ours, family, 1e-3 if family == "gemma3" else CLOSE))
