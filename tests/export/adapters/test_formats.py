"""Adapters as mlx-lm, PEFT and llama.cpp read them: logits, names, shapes, values, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from oracles.whole_model import dense_model
from safetensors.numpy import load_file
from support.adapters import SOME, check_same, read_again, saved_adapter, written
from support.bundles import Tiny, copied, say
from support.llama_names import MATRICES, in_llamas_order
from support.logits import engine_logits
from support.models import each_family, relative
from support.runs import here, refuses, succeeds, train_arguments

from export.config.fuse import FORMATS
from runtime.bundle.store import Bundle, open_bundle

Rng = np.random.Generator
SETTINGS = ({}, {**SOME, "rslora": True, "dropout": 0.1})
TOKENS = 20


def tokens_of(bundle: Bundle, rng: Rng) -> list[int]:
    return list(map(int, rng.integers(0, bundle.manifest.vocab_size, TOKENS)))


@pytest.mark.parametrize("lora", SETTINGS, ids=["default", "some"])
@each_family
def test_logits_are_those_of_mlx_lm(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    bundle = tiny(family)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", **lora)
    out = written(bundle, tmp_path / "ours", "mlx", tmp_path / "mlx")
    assert {path.name for path in out.iterdir()} == {"adapters.safetensors", "adapter_config.json"}
    tokens = tokens_of(bundle, rng)
    model = load_adapters(dense_model(bundle), str(out))
    model.eval()
    theirs = np.array(model(mx.array([tokens]))[0])
    plain = np.array(dense_model(bundle)(mx.array([tokens]))[0])
    adapted = bundle.with_lora(adapters.manifest.lora)
    ours = engine_logits(adapted, adapters, np.array(tokens))
    assert relative(ours, theirs) <= 1e-5
    assert relative(plain, theirs) > 1e-3
    check_same(read_again(bundle, out), adapters)


@pytest.mark.parametrize("lora", SETTINGS, ids=["default", "some"])
def test_peft_has_the_transposes_and_all_settings(
    tiny: Tiny, rng: Rng, tmp_path: Path, lora: dict[str, Any]
) -> None:
    bundle = tiny("qwen3")
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", **lora)
    out = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft", "--base-model", "a/b")
    assert {p.name for p in out.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == len(adapters.tensors)
    for name, value in adapters.tensors.items():
        module, part = name.rsplit(".", 1)
        found = tensors[f"base_model.model.{module}.lora_{part[-1].upper()}.weight"]
        assert found.dtype == np.float32 and np.array_equal(found, np.array(value).T)
    config = json.loads((out / "adapter_config.json").read_bytes())
    settings = adapters.manifest.lora
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == "a/b" and config["bias"] == "none"
    assert (config["r"], config["lora_alpha"]) == (settings.rank, settings.alpha)
    assert (config["use_rslora"], config["lora_dropout"]) == (settings.rslora, settings.dropout)
    if lora:
        assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"]
        assert config["layers_to_transform"] == [1] and config["layers_pattern"] == "layers"
    else:
        assert config["target_modules"] == list(bundle.manifest.linear_names)
        assert config["layers_to_transform"] is None and config["layers_pattern"] is None
    again = read_again(bundle, out)
    check_same(again, adapters)
    check_same(read_again(bundle, out / "adapter_model.safetensors"), adapters)
    assert again.manifest.lora.rslora == settings.rslora
    ours = written(bundle, out, "mlx", tmp_path / "mlx")
    check_same(read_again(bundle, ours), adapters)


@pytest.mark.parametrize("lora", SETTINGS, ids=["default", "some"])
@each_family
def test_gguf_holds_every_tensor_as_llama_cpp_wants_it(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    bundle = tiny(family)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", **lora)
    out = written(bundle, tmp_path / "ours", "gguf", tmp_path / "adapter.gguf")
    reader = gguf.GGUFReader(out)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.type"] == "adapter" and facts["adapter.type"] == "lora"
    assert facts["general.architecture"] == family
    settings = adapters.manifest.lora
    scale = np.float32(facts["adapter.lora.alpha"]) / settings.rank  # as llama.cpp computes it
    assert np.isclose(scale, settings.scale, rtol=1e-6)
    found = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    assert len(found) == len(adapters.tensors)
    config = bundle.manifest.config
    for name, value in adapters.tensors.items():
        _, _, layer, module, matrix, part = name.split(".")
        stored = found[f"blk.{layer}.{MATRICES[f'{module}.{matrix}']}.weight.{part}"]
        expected = np.array(value).T
        if family == "llama" and part == "lora_b" and matrix in ("q_proj", "k_proj"):
            heads = "num_attention_heads" if matrix == "q_proj" else "num_key_value_heads"
            expected = in_llamas_order(expected, config[heads])
            assert not np.array_equal(expected, np.array(value).T)
        assert stored.dtype == np.float32 and np.array_equal(stored, expected), name


def test_a_model_that_also_sees_has_its_language_model_inside(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    folder = copied(tiny("gemma3"), tmp_path / "bundle")
    bundle = open_bundle(say(folder, "provenance/text_model_type", "gemma3_text"))
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", **SOME)
    for form, file, prefix in (
        ("peft", "adapter_model", "base_model.model.model.language_model.layers.2."),
        ("mlx", "adapters", "language_model.model.layers.2."),
    ):
        out = written(bundle, tmp_path / "ours", form, tmp_path / form)
        assert all(name.startswith(prefix) for name in load_file(out / f"{file}.safetensors"))
        check_same(read_again(bundle, out), adapters)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_bytes())
    names = {
        "model.language_model.layers.2.self_attn.q_proj": True,
        "model.language_model.layers.1.self_attn.q_proj": False,
        "model.language_model.layers.2.self_attn.v_proj": False,
        "model.vision_tower.vision_model.encoder.layers.2.self_attn.q_proj": False,
    }
    for name, adapted in names.items():
        assert bool(re.fullmatch(config["target_modules"], name)) is adapted, name
    assert config["layers_to_transform"] is None
    # as Muse Glimmer's, of which mlx-lm's class of the whole is the text model
    own = open_bundle(say(folder, "provenance/model_type", bundle.manifest.family))
    out = written(own, tmp_path / "ours", "mlx", tmp_path / "flat")
    stored = load_file(out / "adapters.safetensors")
    assert all(name.startswith("model.layers.2.") for name in stored)
    check_same(read_again(own, out), adapters)


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "run"
    succeeds(*train_arguments(tiny("gemma3").path, folder, 1))
    return folder


def test_a_run_names_its_bundle(run: Path, tmp_path: Path) -> None:
    found = []
    (save,) = run.glob("saves/step-*")
    for i, source in enumerate((run, run / "adapters.safetensors", save)):
        done = here("adapter", source, "--to", "peft", "-o", tmp_path / str(i), "--json")
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["format"] == "peft" and facts["tensors"] == 42
        assert "tiny-gemma3" in done.stderr and "--base-model" in done.stderr
        found.append((tmp_path / str(i) / "adapter_model.safetensors").read_bytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_there_is_replaced_only_by_force(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    words = ("adapter", run, "--to", form, "-o", out)
    assert here(*words).returncode == 0
    before = {p.name: p.read_bytes() for p in ([out] if out.is_file() else out.iterdir())}
    refused = refuses(2, "exists", *words)
    assert "--force" in refused.stderr
    assert here(*words, "--force").returncode == 0
    assert before == {p.name: p.read_bytes() for p in ([out] if out.is_file() else out.iterdir())}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.toml", "adapter_config.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    refused = here(*words[:-1], copy, "--force")
    assert refused.returncode == 2 and (copy / "config.toml").exists()
    assert len(list(copy.iterdir())) == 2
    if form == "gguf":
        mine = tmp_path / "mine.jsonl"
        mine.write_text("mine")
        refuses(2, "not a GGUF file of an adapter", *words[:-1], mine, "--force")
        assert mine.read_text() == "mine"


def test_without_a_bundle_or_an_adapter_is_said(run: Path, tiny: Tiny, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        (alone / name).write_bytes((run / name).read_bytes())
    out = ("--to", "peft", "-o", tmp_path / "out")
    refuses(2, "give --bundle BUNDLE", "adapter", alone, *out)
    assert here("adapter", alone, *out, "--bundle", tiny("gemma3").path).returncode == 0
    other = ("--to", "peft", "-o", tmp_path / "other")
    refuses(4, "other weights", "adapter", alone, *other, "--bundle", tiny("qwen2").path)
    refuses(4, "no such run", "adapter", tmp_path / "nothing", *other)
    refused = here("eval", tiny("gemma3").path, "--adapter", "some/one", "--data", "random:1")
    assert refused.returncode == 4 and "hf download some/one" in refused.stderr
    refuses(2, "peft, gguf or mlx", "adapter", alone, "--to", "onnx", "-o", tmp_path / "other")
    assert not (tmp_path / "other").exists()
