"""LoRA on the embedding and the head: steps, and what others read; gradients: `test_model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from oracles import whole_model as reference
from oracles.estimators import MonolithicMeZO
from safetensors.numpy import load_file, save_file
from support.adapters import check_same, read_again, saved_adapter, written
from support.bundles import Rng, Tiny
from support.estimators import copy_of, mezo_of
from support.fusing import fused_model
from support.logits import engine_logits
from support.lora import with_lora
from support.models import CLOSE, adapters_of, model_of, relative, rows_of
from support.runs import refuses, train_arguments

from export.fused.model import FusedCheckpoint
from runtime.core.errors import BundleError
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.run.lora import to_apply

ENDS: dict[str, tuple[str, ...]] = {
    "qwen2": ("embed_tokens",),  # tied
    "gemma3": ("embed_tokens", "q_proj"),  # tied, with a factor after the lookup
    "llama": ("embed_tokens", "lm_head", "down_proj"),
}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_forward_passes_move_them_as_on_the_whole_model(
    tiny: Tiny, rng: Rng, seed: int, tmp_path: Path, family: str
) -> None:
    bundle = with_lora(tiny(family), targets=ENDS[family])
    model, adapters, rows = model_of(bundle, 32), adapters_of(bundle, rng), rows_of(bundle, rng)
    oracle = MonolithicMeZO(copy_of(adapters), Noise(seed), 1e-2, 2, 0.01)
    more = {"queries": 2, "epsilon": 1e-2, "weight_decay": 0.01, "lanes": 3}
    running = mezo_of(model, adapters, tmp_path, seed, len(rows), **more)
    for step in range(3):
        result = running.step(step, 1e-2, [rows])
        _, gradients = oracle.step(model, rows, step, 1e-2)
        assert result.record is not None
        np.testing.assert_allclose(result.record[1], gradients, rtol=2e-2, atol=2e-3)
    running.settle()
    for name, value in oracle.adapters.tensors.items():
        assert relative(np.array(adapters.tensors[name]), np.array(value)) <= 1e-3, name


@pytest.mark.parametrize("form", ["peft", "mlx"])
@pytest.mark.parametrize(("family", "layers"), [("qwen2", -1), ("llama", 1), ("gemma3", 1)])
def test_what_others_read_is_the_same(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, layers: int, form: str
) -> None:
    bundle = tiny(family)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", targets=ENDS[family], layers=layers)
    out = written(bundle, tmp_path / "ours", form, tmp_path / form)
    check_same(read_again(bundle, out), adapters)
    tokens = rng.integers(0, bundle.manifest.vocab_size, 20)
    ours = engine_logits(bundle.with_lora(adapters.manifest.lora), adapters, tokens)
    if form == "mlx":
        model = load_adapters(reference.dense_model(bundle), str(out))
        model.eval()
        assert relative(ours, np.array(model(mx.array(tokens)[None])[0])) <= CLOSE
        with fused_model(bundle, adapters) as fused:
            model = reference.checkpoint_model(fused)
        assert relative(ours, np.array(model(mx.array(tokens)[None])[0])) <= CLOSE
        return
    config: dict[str, Any] = json.loads((out / "adapter_config.json").read_bytes())
    tied = family != "llama"
    assert config["ensure_weight_tying"] is tied and config["layers_to_transform"] is None
    tensors = load_file(out / "adapter_model.safetensors")
    head = "base_model.model.lm_head.lora_A.weight"
    if tied:  # PEFT also saves the weights themselves, and its users may tie nothing
        with FusedCheckpoint(bundle, {}) as model:
            own = model.rows("model.embed_tokens.weight", 0, bundle.manifest.vocab_size)
        tensors["base_model.model.lm_head.base_layer.weight"] = own * np.float32(1.001)
        save_file(tensors, out / "adapter_model.safetensors")
        check_same(read_again(bundle, out), adapters)
        to_apply(out, bundle)
        grown = tensors | {"base_model.model.model.embed_tokens.base_layer.weight": own[:-1]}
        other = tensors | {"base_model.model.lm_head.base_layer.weight": own.copy()}
        other["base_model.model.lm_head.base_layer.weight"][[3, 5]] = 1
        for spoilt, said in ((grown, "the model itself, and the bundle has"), (other, "2 of its")):
            save_file(spoilt, out / "adapter_model.safetensors")
            with pytest.raises(BundleError, match=f"base_layer.weight is .*{said}.* merge it"):
                to_apply(out, bundle)
        tensors[head] = tensors[head] * 2
        save_file(tensors, out / "adapter_model.safetensors")
        with pytest.raises(BundleError, match="ensure_weight_tying=True"):
            read_again(bundle, out)


def test_llama_cpp_has_them_untied(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    """It looks rows of A up, and takes the tied head's matrix by the embedding's name."""
    bundle = tiny("llama")
    adapters = saved_adapter(bundle, rng, tmp_path / "ours", targets=ENDS["llama"])
    out = written(bundle, tmp_path / "ours", "gguf", tmp_path / "adapter.gguf")
    found = {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(out).tensors}
    ours = {name: np.array(value) for name, value in adapters.tensors.items()}
    for name, expected in (
        ("token_embd.weight.lora_a", ours["model.embed_tokens.lora_a"]),
        ("token_embd.weight.lora_b", ours["model.embed_tokens.lora_b"].T),
        ("output.weight.lora_a", ours["lm_head.lora_a"].T),
        ("output.weight.lora_b", ours["lm_head.lora_b"].T),
    ):
        assert np.array_equal(found[name], expected), name
    tied = tiny("qwen2")
    saved_adapter(tied, rng, tmp_path / "tied", targets=ENDS["qwen2"])
    words = ("adapter", tmp_path / "tied", "--bundle", tied.path, "--to", "gguf")
    refuses(2, "ondevice fuse --format gguf", *words, "-o", tmp_path / "tied.gguf")


def test_what_cannot_be_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    tied, run = tiny("qwen2").path, tmp_path / "run"
    for options, said in (
        ({"lora_targets": "lm_head"}, "by which its head multiplies, too"),
        ({"lora_targets": "embed_tokens", "lora_dropout": 0.1}, "give --lora-dropout 0"),
        ({"lora_targets": "embed_tokens", "method": "zo-act"}, "is not for zo-act"),
    ):
        refuses(2, said, *train_arguments(tied, run, 2, **options))


def test_an_embedding_that_layers_read_as_well_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Gemma 4's layers would look tokens up without the adapter."""
    bundle, target = tiny("gemma4"), "embed_tokens"
    said = f"an adapter of {target}: layers of this model look tokens up in this matrix as well"
    refuses(2, said, *train_arguments(bundle.path, tmp_path / "run", 2, lora_targets=target))
    adapter = with_lora(bundle, targets=(target,))
    Adapters.initial(adapter.manifest, 0).save(tmp_path)
    refuses(2, said, "eval", bundle.path, "--data", "random:0", "--adapter", tmp_path)
