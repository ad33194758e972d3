"""Adapters and fused checkpoints of models whose tensors transformers has otherwise than mlx-lm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers
from model_types.tiny import family_of
from model_types.tiny import tiny as tiny_settings
from oracles.whole_model import dense_model
from safetensors.numpy import load_file
from support.adapters import check_same, read_again, saved_adapter, written
from support.bundles import Tiny, runnable, settings
from support.checkpoints import Arrays, weights_of, write_folder
from support.fusing import fused_model, silent
from support.lora import with_lora
from support.models import Rng, adapters_of
from support.peers import run_script
from support.random_types import random_bundle
from support.runs import refuses

from export.adapters.adapter import Adapter
from export.adapters.elsewhere import terms_elsewhere
from export.bundle import export_bundle
from export.fused.checkpoint import write_checkpoint
from export.sources.families import transformers_config
from export.sources.model_classes import model_class
from export.sources.random import PRESETS
from export.sources.verified import is_verified, tried_types
from runtime.adapters.origins import RENAMED, loaded_as
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.joined_adapters import joined, pieces_of

SCALE = 2.0  # of the default settings
EXPERTS = 4  # of the tiny model


def as_transformers_has_them(family: str, arrays: Arrays) -> Arrays:
    """GPT-2's matrices are transposed, Granite's gate is above its up, Qwen's experts are apart.

    Granite's experts are stacked so, and gpt-oss's transposed, with gate and up in turn.
    """
    if family in STACKED:
        return stacked(family, arrays)
    if family == "qwen3_moe":
        return {
            name.replace(".switch_mlp.", f".experts.{number}."): part
            for name, value in arrays.items()
            for number, part in enumerate(np.split(value, EXPERTS if "switch" in name else 1))
        }
    if family == "gpt2":
        turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        return {
            f"transformer.{name.removeprefix('model.')}": np.ascontiguousarray(v.T)
            if name.endswith(turned)
            else v
            for name, v in arrays.items()
        }
    found = {}
    for name, value in arrays.items():
        inside, _, last = name.partition(".mlp.")
        if last == "gate_proj.weight":
            both = value, arrays[name.replace("gate_proj", "up_proj")]
            found[f"{inside}.shared_mlp.input_linear.weight"] = np.concatenate(both)
        elif last == "down_proj.weight":
            found[f"{inside}.shared_mlp.output_linear.weight"] = value
        elif not last:
            found[name] = value
    return found


STACKED = {"granitemoe": ("input_linear.weight", "output_linear.weight")}
STACKED["gpt_oss"] = "experts.gate_up_proj", "experts.down_proj"


def stacked(family: str, arrays: Arrays) -> Arrays:
    both, last = STACKED[family]
    found = {}
    for name, value in arrays.items():
        experts = re.fullmatch(r"(.*)\b(?:switch_mlp|experts)\.(gate|up|down)_proj\.(\w+)", name)
        if not experts:
            found[name] = value
            continue
        (base, half, kind), values = experts.groups(), [value]
        if half == "up":
            continue
        if half == "gate":
            values.append(arrays[name.replace("gate_proj", "up_proj")])
        if kind == "weight":
            values = [x.reshape(EXPERTS, -1, x.shape[1]) for x in values]
        if family == "gpt_oss":
            values = [x.swapaxes(1, -1) for x in values] if kind == "weight" else values
            whole = np.stack(values, axis=-1).reshape(*values[0].shape[:-1], -1)
        else:
            whole = np.concatenate(values, axis=1)
        suffix = "" if kind == "weight" else "_bias"
        found[f"{base}{both if half == 'gate' else last}{suffix}"] = whole
    return found


def exported(folder: Path, family: str) -> tuple[Arrays, Bundle]:
    """A checkpoint's tensors by transformers' names, and a bundle of them in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, f"tiny-{family}", tiny_settings(family))
        config, arrays = weights_of(f"tiny-{family}")
    config = transformers_config(config["model_type"], config, "float32")
    theirs = as_transformers_has_them(family, arrays)
    assert theirs.keys() != arrays.keys()
    model = write_folder(folder / "model", config, theirs)
    made = export_bundle(settings(model, folder / "bundle", bits=32, seq_lens=(32,)))
    return theirs, runnable(made.path)


def added_elsewhere(family: str, adapters: Adapters) -> Arrays:
    """What the adapter adds to each tensor, as transformers has it."""
    terms = {
        f"{name.removesuffix('.lora_a')}.weight": SCALE
        * (np.array(value) @ np.array(adapters.tensors[f"{name[:-1]}b"])).T
        for name, value in adapters.tensors.items()
        if name.endswith("lora_a")
    }
    return as_transformers_has_them(family, terms)


@pytest.mark.parametrize(
    "family",
    [
        *("gpt2", "granitemoehybrid", "gpt_oss"),
        "qwen3_moe",
        pytest.param("granitemoe", marks=pytest.mark.slow),
    ],
)
def test_what_is_added_is_added_to_the_same_rows(tmp_path: Path, rng: Rng, family: str) -> None:
    theirs, bundle = exported(tmp_path, family)
    lora = {"targets": ("q_proj", "o_proj")} if family in (*STACKED, "qwen3_moe") else {}
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", **lora)
    added = added_elsewhere(family, adapters)
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "fused", "float32", 1 << 15, False, silent)
    fused: Arrays = {}
    for shard in (tmp_path / "fused").glob("*.safetensors"):
        fused |= load_file(shard)
    assert fused.keys() == theirs.keys()
    for name, value in fused.items():
        assert np.allclose(value, theirs[name] + added.get(name, 0), atol=1e-5), name
    out = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft")
    config: dict[str, Any] = json.loads((out / "adapter_config.json").read_bytes())
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(added)
    for name, value in added.items():
        module = name.removesuffix(".weight")
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        rank = config["rank_pattern"].get(module, config["r"])
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        assert rank == len(a) and module.rpartition(".")[2] in config["target_modules"]
        delta = alpha / rank * b @ a
        assert np.allclose(delta.T if family == "gpt2" else delta, value, atol=1e-5), name
    assert config["fan_in_fan_out"] == (family == "gpt2")
    assert bool(config["rank_pattern"]) == (family == "granitemoehybrid")
    check_same(read_again(bundle, out), adapters)


@pytest.mark.slow
def test_modules_have_the_names_with_which_transformers_loads_them(tmp_path: Path) -> None:
    settings = {name: tiny_settings(name) for name in filter(is_verified, tried_types())}
    settings = {n: s for n, s in settings.items() if "text_config" not in s and model_class(n)}
    settings["with experts"] = tiny_settings("granitemoehybrid", num_local_experts=EXPERTS)
    (tmp_path / "types.json").write_text(json.dumps(settings))
    run_script(("torch", "transformers"), "renamed.py", tmp_path / "types.json")
    names = json.loads((tmp_path / "types.out.json").read_bytes())
    assert names.keys() == settings.keys()
    changed = set()
    for name, tensors in names.items():
        family = family_of(settings[name]["model_type"])
        for stored, theirs in tensors.items():
            assert loaded_as(family, stored) == theirs, name
            changed |= {family} if stored != theirs else set()
    assert changed >= {"exaone", "gpt_neox", "granitemoe", "granitemoehybrid", "mixtral"}


def with_origins(manifest: Manifest, origins: object) -> Manifest:
    return msgspec.structs.replace(manifest, provenance={"name": "m", RENAMED: origins})


def test_a_part_of_a_fused_matrix_alone_and_a_joined_one(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen2")
    name = "model.layers.0.mlp.{}_proj"
    rows, width = (bundle.manifest.matrices[name.format(one)].rows for one in ("up", "down"))
    origins = {
        f"{name.format('up')}.weight": [["both.weight", rows, rows, 2 * rows, False]],
        f"{name.format('gate')}.weight": [["both.weight", 0, rows, 2 * rows, False]],
        f"{name.format('down')}.weight": [
            ["x.weight", 0, 4, 4],
            ["y.weight", 0, width - 4, width - 4],
        ],
    }
    adapters = adapters_of(bundle, rng)
    ours = {key: np.array(value) for key, value in adapters.tensors.items() if "gate" not in key}
    terms = terms_elsewhere(Adapter(with_origins(adapters.manifest, origins), ours), "--to peft")
    up, down = (ours[f"{name.format(one)}.lora_b"] for one in ("up", "down"))
    assert terms["both"].b.shape == (adapters.manifest.lora.rank, 2 * rows)
    assert not terms["both"].b[:, :rows].any() and np.array_equal(terms["both"].b[:, rows:], up)
    assert np.array_equal(np.concatenate([terms["x"].b, terms["y"].b], axis=1), down)
    assert np.array_equal(terms["x"].a, terms["y"].a)


@pytest.mark.parametrize("some", [("q",), ("q", "v"), ("q", "k", "v")])
def test_matrices_of_a_fused_one_are_read_as_they_were_written(
    tiny: Tiny, rng: Rng, some: tuple[str, ...]
) -> None:
    bundle = with_lora(tiny("qwen2"), targets=tuple(f"{one}_proj" for one in some), layers=1)
    attention = f"{bundle.manifest.layers[-1].name}.self_attn"
    rows = [bundle.manifest.matrices[f"{attention}.{one}_proj"].rows for one in "qkv"]
    origins = {
        f"{attention}.{one}_proj.weight": [["qkv.weight", sum(rows[:at]), rows[at], sum(rows)]]
        for at, one in enumerate("qkv")
    }
    adapters = adapters_of(bundle, rng)
    manifest = with_origins(adapters.manifest, origins)
    ours = {key: np.array(value) for key, value in adapters.tensors.items()}
    term = terms_elsewhere(Adapter(manifest, ours), "--to peft")["qkv"]
    there = {"qkv.lora_a": term.a, "qkv.lora_b": term.b}
    shapes, rank = {name: value.shape for name, value in there.items()}, manifest.lora.rank
    pieces = pieces_of(shapes, manifest, rank, there.__getitem__)
    assert pieces.keys() == {f"{attention}.{one}_proj" for one in some}
    for name, value in ours.items():
        found = joined(name, pieces[name.rpartition(".")[0]], there.__getitem__)
        assert np.array_equal(found, value), name
    if len(some) == 1:  # as PEFT trains it: one A, and a B that reaches all rows
        there["qkv.lora_b"] = dense = term.b + 1
        pieces = pieces_of(shapes, manifest, rank, there.__getitem__)
        names = [f"{attention}.{one}_proj.lora_b" for one in "qkv"]
        found = [joined(n, pieces[n.rpartition(".")[0]], there.__getitem__) for n in names]
        assert np.array_equal(np.concatenate(found, axis=1), dense)
    else:
        there["qkv.lora_b"] = term.b + 1
        with pytest.raises(ValueError, match="which is not made of adapters of rank 8"):
            pieces_of(shapes, manifest, rank, there.__getitem__)


DAMAGED = BundleError, "damaged"


@pytest.mark.parametrize(
    ("origins", "error", "said"),
    [
        ({"a.weight": [["b.weight", 0, 4, 8, False]]}, UsageError, "mlx-lm has not all rows"),
        ({"a.weight": [["b.weight", 6, 4, 8, False]]}, BundleError, "damaged"),
        ({"a.weight": [["b.weight", 0, "4", 8, False]]}, BundleError, "damaged"),
        ({"a.weight": [["b.*", 0, 4, 4, False, 1 << 40]]}, BundleError, "damaged"),
        ({"a.weight": 1}, BundleError, "damaged"),
        ({"a.weight": []}, BundleError, "a.weight is from nowhere"),
        ({"a.weight": [["c.weight", 0, 2, 4]], "b.weight": [["c.weight", 1, 2, 4]]}, *DAMAGED),
        ({"a.weight": [["c.weight", 0, 2, 2]], "b.weight": [["c.weight", 2, 2, 4]]}, *DAMAGED),
        ({"a.weight": [["c.weight", 0, 4, 4, False, [0, 0, 4]]]}, *DAMAGED),
        ({"a.weight": [["c.weight", 0, 2, 4, False, None, 1, 0]]}, *DAMAGED),
        ({"a.weight": [["c.weight", 0, 3, 4, False, None, 1, 2]]}, *DAMAGED),
        ({"a.weight": [["c.weight", 1, 2, 4, False, None, 1, 2]]}, UsageError, "not all rows"),
        ({"a.weight": [["c.weight", 0, 2, 4, False, None, 1, 1, 3]]}, UsageError, "not all rows"),
        ({"a.weight": [["c.weight", 0, 4, 4, False, None, 1, 1, 1 << 40]]}, *DAMAGED),
    ],
)
def test_what_is_not_known_or_damaged_is_refused(
    tiny: Tiny, rng: Rng, origins: object, error: type[Exception], said: str
) -> None:
    adapters = adapters_of(tiny("qwen2"), rng)
    ours = {key: np.array(value) for key, value in adapters.tensors.items()}
    with pytest.raises(error, match=said):
        terms_elsewhere(Adapter(with_origins(adapters.manifest, origins), ours), "--to peft")


def test_routers_are_named_as_parameters(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("qwen3-moe")
    saved_adapter(bundle, rng, tmp_path / "ours")
    out = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft")
    config = json.loads((out / "adapter_config.json").read_bytes())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    layers = range(len(bundle.manifest.layers))
    assert config["target_parameters"] == [f"model.layers.{i}.mlp.gate.weight" for i in layers]
    check_same(read_again(bundle, out), read_again(bundle, tmp_path / "ours"))
    saved_adapter(bundle, rng, tmp_path / "drops", dropout=0.1)
    words = ("adapter", tmp_path / "drops", "--bundle", bundle.path, "--to", "peft")
    refuses(2, "PEFT has no dropout (0.1)", *words, "-o", tmp_path / "none")


@pytest.mark.slow
def test_a_router_of_another_kind_is_not_written_for_mlx_lm(tmp_path: Path, rng: Rng) -> None:
    """mlx-lm adapts linear layers, and GLM 4.5's class has routers that are none."""
    bundle = random_bundle(tmp_path, "glm4_moe")
    saved_adapter(bundle, rng, tmp_path / "ours")
    words = ("adapter", tmp_path / "ours", "--bundle", bundle.path, "--to", "mlx")
    refuses(2, "has model.layers.1.mlp.gate as something else", *words, "-o", tmp_path / "none")
    lora = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["mlp.gate"]}
    with pytest.raises(ValueError, match="MoEGate"):
        linear_to_lora_layers(dense_model(bundle), 4, lora)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    saved_adapter(bundle, rng, tmp_path / "attention", targets=attention)
    written(bundle, tmp_path / "attention", "mlx", tmp_path / "mlx")
