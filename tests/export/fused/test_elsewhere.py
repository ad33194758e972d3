"""Logits of transformers and of llama.cpp with the models that were fused for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.adapters import saved_adapter, written
from support.bundles import runnable, settings
from support.fusing import added, fused_model, silent
from support.logits import apart, engine_logits, exact_factor, mlx_lm_logits, typical
from support.models import Rng, Tiny, adapters_of, each_family, each_with_mixers
from support.peers import (
    LLAMA,
    TORCH,
    interpreter,
    llama_logits,
    peft_logits,
    run_script,
)
from support.random_types import random_bundle

from export.bundle import export_bundle
from export.fused.checkpoint import write_checkpoint
from export.fused.gguf import write_gguf
from export.fused.model import FusedCheckpoint
from export.sources.gguf_names import ARCHITECTURES, TYPES, WITHOUT_ADAPTER

CLOSE = 1e-3
TOKENS = 40  # longer than the windows of the tiny Gemma


@pytest.mark.slow
@each_with_mixers
def test_transformers_loads_the_folder(tiny: Tiny, tmp_path: Path, rng: Rng, family: str) -> None:
    interpreter(*TORCH)
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "hf", "float32", 1 << 40, False, silent)
    tokens = rng.integers(0, bundle.manifest.vocab_size, TOKENS)
    theirs = peft_logits(tmp_path / "hf", "-", tokens.tolist(), tmp_path)
    print(family, error := apart(theirs, engine_logits(bundle, adapters, tokens)))
    assert error < CLOSE
    assert apart(theirs, engine_logits(bundle, None, tokens)) > 0.01


@pytest.mark.slow
@each_family
def test_llama_cpp_loads_the_file(tiny: Tiny, tmp_path: Path, rng: Rng, family: str) -> None:
    interpreter(*LLAMA)
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    with fused_model(bundle, adapters) as model:
        path = write_gguf(model, tmp_path / "model.gguf", "float32", False, silent)
    tokens = rng.integers(0, bundle.manifest.vocab_size, TOKENS)
    theirs = llama_logits(path, "-", tokens.tolist(), tmp_path)
    print(family, error := apart(theirs, engine_logits(bundle, adapters, tokens)))
    assert error < CLOSE
    assert apart(theirs, engine_logits(bundle, None, tokens)) > 0.01


# llama.cpp's GELU is a table of float16, and Gemma's factor is rounded in a bundle
WIDER = dict.fromkeys(
    (
        *("starcoder2", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "phi"),
        *("gpt_bigcode", "gpt_neox"),
    ),
    CLOSE,
)


@pytest.mark.slow
def test_llama_cpp_computes_every_architecture_as_here(tmp_path: Path, rng: Rng) -> None:
    """With an adapter of each; in the weights where llama.cpp would not apply it."""
    interpreter(*LLAMA)
    ours = {}
    for model_type in ARCHITECTURES:
        kind = TYPES.get(model_type, model_type)
        bundle = random_bundle(tmp_path / f"bundle of {model_type}", kind)
        tokens = rng.integers(3, bundle.manifest.vocab_size, TOKENS)
        (tmp_path / model_type).mkdir()
        adapters = saved_adapter(bundle, rng, tmp_path / f"adapter of {model_type}")
        ignored = model_type in WITHOUT_ADAPTER
        if not ignored:
            written(
                *(bundle, tmp_path / f"adapter of {model_type}", "gguf"),
                tmp_path / model_type / "adapter.gguf",
            )
        ours[model_type] = engine_logits(bundle, adapters, tokens)
        assert apart(engine_logits(bundle, None, tokens), ours[model_type]) > 0.01
        np.save(tmp_path / model_type / "tokens.npy", tokens)
        with FusedCheckpoint(bundle, added(adapters) if ignored else {}) as model:
            path = tmp_path / model_type / "model.gguf"
            write_gguf(model, path, "float32", False, silent)
    run_script(LLAMA, "llama_logits.py", tmp_path)
    for model_type, expected in ours.items():
        error = apart(np.load(tmp_path / model_type / "logits.npy"), expected)
        print(model_type, error)
        assert error <= WIDER.get(model_type, 1e-5), model_type


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_elsewhere(real_gguf: Path, tmp_path: Path, rng: Rng) -> None:
    """Gemma 3 270M: by mlx-lm, and by transformers and llama.cpp where they are installed.

    mlx-lm, and so the bundle, rounds the embedding's factor to bfloat16; the others do not in
    float32. So there are two steps: with that factor all agree with the bundle that can be given
    it; and without the rounding mlx-lm agrees with the others as they are.
    """
    export_bundle(settings(real_gguf, tmp_path / "bundle", seq_lens=(64,), quality=False))
    bundle = runnable(tmp_path / "bundle")
    adapters = adapters_of(bundle, rng)
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "hf", "float32", 1 << 30, False, silent)
        path = write_gguf(model, tmp_path / "model.gguf", "float32", False, silent)
    tokens = np.array([2, *rng.integers(300, 50000, TOKENS)])
    ours = engine_logits(bundle, adapters, tokens)
    assert apart(mlx_lm_logits(tmp_path / "hf", tokens), ours) < 1e-4
    exact = mlx_lm_logits(tmp_path / "hf", tokens, exact_factor(bundle))
    print("the factor alone moves logits by", apart(exact, ours))
    interpreter(*TORCH)
    interpreter(*LLAMA)
    rounded = peft_logits(tmp_path / "hf", "-", tokens.tolist(), tmp_path)
    own = peft_logits(tmp_path / "hf", "-", tokens.tolist(), tmp_path, rounded=False)
    llama = llama_logits(path, "-", tokens.tolist(), tmp_path)
    for name, theirs, expected in (
        ("transformers with the rounded factor", rounded, ours),
        ("transformers", own, exact),
    ):
        print(name, error := apart(theirs, expected), "from the bundle", apart(theirs, ours))
        assert error < 1e-4
    print("llama.cpp", error := typical(llama, exact), "from the bundle", typical(llama, ours))
    assert error < CLOSE < typical(llama, engine_logits(bundle, None, tokens))
    with fused_model(bundle, adapters) as model:
        write_checkpoint(model, tmp_path / "bf16", "bfloat16", 1 << 30, False, silent)
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / "bf16"
        theirs = peft_logits(folder, "-", tokens.tolist(), tmp_path, dtype, rounded=False)
        print("bfloat16 weights, computed in", dtype, error := apart(theirs, ours))
        assert error < 0.1
