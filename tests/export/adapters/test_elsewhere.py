"""Logits of transformers with PEFT, and of llama.cpp, with the adapters written for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_types.tiny import tiny as tiny_settings
from support.adapters import SOME, check_same, read_again, saved_adapter, written
from support.bundles import Tiny, runnable, settings
from support.checkpoints import Arrays, weights_of, whole, write_folder
from support.gguf_files import seeing_file, write_gguf
from support.logits import engine_logits, exact_factor, typical
from support.models import FAMILIES, each_family, relative
from support.peers import LLAMA, TORCH, interpreter, llama_logits, peft_logits, run_script

from export.bundle import export_bundle
from export.sources.families import transformers_config
from export.sources.open import open_checkpoint
from export.sources.random import PRESETS
from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters

Rng = np.random.Generator
TOKENS = 20
REAL_SIZE = 0.02  # of the B of adapters; moves a real model's logits by about a third


def tiny_checkpoint(folder: Path, family: str) -> tuple[Path, Bundle]:
    """A folder that transformers loads, and a bundle with the same float32 weights."""
    preset = f"tiny-{family}"
    with pytest.MonkeyPatch.context() as patch:
        if preset not in PRESETS:
            patch.setitem(PRESETS, preset, tiny_settings(family))
        config, arrays = weights_of(preset)
    config = transformers_config(config["model_type"], config, "float32")
    model = write_folder(folder / "model", config, arrays)
    made = export_bundle(settings(model, folder / "bundle", bits=32, seq_lens=(32,)))
    return model, runnable(made.path)


def ours(adapters: Adapters, bundle: Bundle, tokens: list[int]) -> np.ndarray:
    return engine_logits(bundle.with_lora(adapters.manifest.lora), adapters, np.array(tokens))


@pytest.mark.slow
# a fused matrix, caps, a bias of the head, learned positions, and a class that mlx-lm has not
@pytest.mark.parametrize(
    "family", [*FAMILIES, "qwen3", "phi3", "gemma2", "phi", "gpt_bigcode", "opt"]
)
def test_logits_are_those_of_peft(tmp_path: Path, rng: Rng, family: str) -> None:
    interpreter(*TORCH)
    model, bundle = tiny_checkpoint(tmp_path, family)
    tokens = list(map(int, rng.integers(0, bundle.manifest.vocab_size, TOKENS)))
    outside = bundle.manifest.outside_names  # of tied models one, which PEFT's head has as well
    settings_of_both: list[dict[str, Any]] = [{}, {**SOME, "rslora": True}]
    if family == "gpt_bigcode":  # whose matrices have other names than SOME has
        settings_of_both.pop()
    elif family in (*FAMILIES, "qwen3"):
        settings_of_both.append({"targets": ("q_proj", *outside), "layers": 1})
    for i, lora in enumerate(settings_of_both):
        adapters = saved_adapter(bundle, rng, tmp_path / f"ours{i}", **lora)
        out = written(bundle, tmp_path / f"ours{i}", "peft", tmp_path / f"peft{i}")
        theirs = peft_logits(model, out, tokens, tmp_path)
        print(family, "PEFT", error := relative(ours(adapters, bundle, tokens), theirs))
        assert error <= 1e-3
    plain = peft_logits(model, "-", tokens, tmp_path)
    assert relative(plain, theirs) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adapters_that_peft_has_written_are_applied(tmp_path: Path, rng: Rng, dtype: str) -> None:
    interpreter(*TORCH)
    model, bundle = tiny_checkpoint(tmp_path, "qwen2")
    config = {
        "r": 5, "lora_alpha": 7, "use_rslora": True, "lora_dropout": 0.1,
        "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1],
    }  # fmt: skip
    run_script(TORCH, "peft_trained.py", model, tmp_path / "peft", json.dumps(config), dtype)
    adapters = read_again(bundle, tmp_path / "peft")
    lora = adapters.manifest.lora
    assert (lora.rank, lora.alpha, lora.layers, lora.rslora) == (5, 7.0, 1, True)
    assert lora.targets == ("q_proj", "up_proj") and lora.dropout == 0.1
    tokens = list(map(int, rng.integers(0, bundle.manifest.vocab_size, TOKENS)))
    theirs = peft_logits(model, tmp_path / "peft", tokens, tmp_path)
    assert relative(ours(adapters, bundle, tokens), theirs) <= 1e-3
    assert relative(peft_logits(model, "-", tokens, tmp_path), theirs) > 1e-2
    out = written(bundle, tmp_path / "peft", "peft", tmp_path / "again")
    check_same(read_again(bundle, out), adapters)


def float32_file(path: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    """A GGUF file without a tokenizer."""
    entries = {"tokenizer.ggml.model": "none", "arch.vocab_size": config["vocab_size"]}
    return write_gguf(path, config, arrays, entries, stored_as=gguf.GGMLQuantizationType.F32)


@pytest.mark.slow
@each_family
def test_logits_are_those_of_llama_cpp(tiny: Tiny, tmp_path: Path, rng: Rng, family: str) -> None:
    """Llama's rows are in another order there, so that wrong ones would show."""
    interpreter(*LLAMA)
    config, arrays = weights_of(f"tiny-{family}")
    path = float32_file(tmp_path / "model.gguf", config, arrays)
    bundle = tiny(family, bits=32, seq_lens=(32,))
    tokens = list(map(int, rng.integers(0, bundle.manifest.vocab_size, TOKENS)))
    for i, lora in enumerate(({}, {**SOME, "rslora": True})):
        adapters = saved_adapter(bundle, rng, tmp_path / f"ours{i}", **lora)
        out = written(bundle, tmp_path / f"ours{i}", "gguf", tmp_path / f"adapter{i}.gguf")
        theirs = llama_logits(path, out, tokens, tmp_path)
        print(family, "llama.cpp", error := relative(ours(adapters, bundle, tokens), theirs))
        assert error <= 1e-3
    assert relative(llama_logits(path, "-", tokens, tmp_path), theirs) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_of_the_text_model_of_one_that_sees_are_those_of_llama_cpp(
    tmp_path: Path, rng: Rng, family: str
) -> None:
    """Of its file, which the adapter's goes with.

    Of Qwen 2's that sees llama.cpp (b11669) takes 0 for the epsilon of norms.
    """
    interpreter(*LLAMA)
    config, arrays = weights_of(f"tiny-{family}")
    path = seeing_file(tmp_path / "model.gguf", config | {"rms_norm_eps": 1e-12}, arrays)
    bundle = runnable(
        export_bundle(settings(path, tmp_path / "bundle", bits=32, seq_lens=(32,))).path
    )
    tokens = list(map(int, rng.integers(0, bundle.manifest.vocab_size, TOKENS)))
    adapters = saved_adapter(bundle, rng, tmp_path / "ours")
    out = written(bundle, tmp_path / "ours", "gguf", tmp_path / "adapter.gguf")
    theirs = llama_logits(path, out, tokens, tmp_path)
    print(family, "llama.cpp", error := relative(ours(adapters, bundle, tokens), theirs))
    assert error <= 1e-5
    assert relative(llama_logits(path, "-", tokens, tmp_path), theirs) > 1e-2


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_in_all_three(real_gguf: Path, tmp_path: Path, rng: Rng) -> None:
    """Gemma 3 270M: the file's weights, dequantized to float32 in the bundle and for the others.

    llama.cpp also reads the file itself. There it multiplies by the quantized weights, and rounds
    what it multiplies them with: how far that leads without an adapter is the measure. mlx-lm, and
    so the bundle, rounds the embedding's factor to bfloat16; the others do not in float32. So there
    are two steps: transformers with the rounded factor agrees with the bundle, and the bundle's
    engine with the exact one agrees with llama.cpp and with transformers as they are.
    """
    with open_checkpoint(str(real_gguf)) as source:
        arrays = {name: whole(source, name) for name in source.names()}
        config = transformers_config(source.family, source.config, "float32")
        model = write_folder(tmp_path / "model", config, arrays)
        floats = float32_file(tmp_path / "float32.gguf", source.config, arrays)
        del arrays
    made = export_bundle(settings(real_gguf, tmp_path / "bundle", bits=32, seq_lens=(32,)))
    bundle = runnable(made.path)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", size=REAL_SIZE)
    tokens = [2, *map(int, rng.integers(300, 50000, TOKENS))]
    here = ours(adapters, bundle, tokens)
    peft = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft")
    theirs = peft_logits(model, peft, tokens, tmp_path)
    plain = peft_logits(model, "-", tokens, tmp_path)
    print("Gemma 3 270M PEFT", relative(here, theirs), "without", relative(plain, theirs))
    assert relative(here, theirs) <= 1e-4 and relative(plain, theirs) > 1e-2
    adapted = bundle.with_lora(adapters.manifest.lora)
    exact = engine_logits(adapted, adapters, np.array(tokens), exact_factor(bundle))
    own = peft_logits(model, peft, tokens, tmp_path, rounded=False)
    print("the factor alone moves logits by", relative(exact, here), "PEFT", relative(own, exact))
    assert relative(own, exact) <= 1e-4
    if interpreter(*LLAMA):
        file = written(bundle, tmp_path / "ours", "gguf", tmp_path / "adapter.gguf")
        floating = llama_logits(floats, file, tokens, tmp_path)
        found, unscaled = typical(floating, exact), typical(floating, here)
        print("llama.cpp in float32:", found, "from the rounded factor", unscaled)
        assert found <= 1e-3
        llama = llama_logits(real_gguf, file, tokens, tmp_path)
        without = llama_logits(real_gguf, "-", tokens, tmp_path)
        far, base, unadapted = (
            typical(llama, theirs), typical(without, plain), typical(plain, theirs)
        )  # fmt: skip
        print("llama.cpp, Q4_K_M:", far, "without an adapter", base, "of", unadapted)
        assert far <= 2 * base and far <= unadapted / 2
