"""Fused checkpoint folders: what transformers asks for, and the logits of bundle and adapter."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from support.files import listing
from support.fusing import SAME, fused_model, read_again, silent
from support.logits import apart, engine_logits, mlx_lm_logits
from support.models import Rng, Tiny, adapters_of, each_family, each_with_mixers

from export.fused.checkpoint import write_checkpoint
from export.sources.open import open_checkpoint
from export.sources.source import INSIDE
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, StorageError, UsageError
from runtime.methods.adapters import Adapters

ONE_FILE = 1 << 40
CLASSES = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
}


def write(
    bundle: Bundle,
    adapters: Adapters,
    output: Path,
    dtype: str = "float32",
    shard_bytes: int = ONE_FILE,
    force: bool = False,
) -> int:
    with fused_model(bundle, adapters) as model:
        return write_checkpoint(model, output, dtype, shard_bytes, force, silent)


@each_with_mixers
def test_mlx_lm_and_a_new_export_give_the_logits_of_bundle_and_adapter(
    tiny: Tiny, tmp_path: Path, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    tokens = rng.integers(0, bundle.manifest.vocab_size, 30)
    expected = engine_logits(bundle, adapters, tokens)
    write(bundle, adapters, tmp_path / "hf")
    assert apart(mlx_lm_logits(tmp_path / "hf", tokens), expected) < SAME
    read_again(tmp_path / "hf", bundle, adapters, rng)


@each_family
def test_the_configuration_is_complete_and_says_nothing_of_another_checkpoint(
    tiny: Tiny, tmp_path: Path, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    stale = {"quantization_config": {"bits": 4}, "torch_dtype": "float16", "auto_map": {"a": "b"}}
    bundle.manifest.config.update(stale)
    try:
        write(bundle, adapters_of(bundle, rng), tmp_path / "hf", "bfloat16")
    finally:
        for key in stale:
            del bundle.manifest.config[key]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    model_type, name = CLASSES[family]
    assert config["architectures"] == [name] and config["model_type"] == model_type
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert not {"quantization_config", "quantization", "auto_map"} & set(config)
    assert {"rope_theta", "max_position_embeddings", "tie_word_embeddings"} <= set(config)
    assert ("lm_head" in bundle.manifest.matrices) != config["tie_word_embeddings"]
    if family == "gemma3":
        assert config["layer_types"] == [
            *("sliding_attention", "full_attention", "sliding_attention")
        ]
    with open_checkpoint(str(tmp_path / "hf")) as again:
        kept = {key: again.config[key] for key in bundle.manifest.config}
        assert kept == bundle.manifest.config


@pytest.mark.parametrize(
    ("dtype", "code", "item"),
    [
        ("float16", "F16", np.float16),
        ("bfloat16", "BF16", ml_dtypes.bfloat16),
        ("float32", "F32", np.float32),
    ],
)
def test_weights_in_shards_are_rounded_once(
    tiny: Tiny, tmp_path: Path, rng: Rng, dtype: str, code: str, item: type
) -> None:
    bundle = tiny("llama")
    adapters = adapters_of(bundle, rng)
    size = write(bundle, adapters, tmp_path / "hf", dtype, shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    found: dict[str, str] = {}
    with fused_model(bundle, adapters) as model:
        for name in files:
            tensors = 0
            with safe_open(tmp_path / "hf" / name, framework="numpy") as file:
                assert file.metadata() == {"format": "pt"}
                for key in file.keys():  # noqa: SIM118 - it is no dictionary
                    found[key] = name
                    part = file.get_slice(key)
                    assert part.get_dtype() == code
                    values = model.rows(key, 0, model.shape(key)[0])
                    expected = values.astype(item)
                    np.testing.assert_array_equal(file.get_tensor(key), expected)
                    tensors += expected.nbytes
            assert tensors <= 200_000 or list(found.values()).count(name) == 1
        assert found == index["weight_map"] and set(found) == set(model.names())


def test_refusals_leave_nothing(
    tiny: Tiny, tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny("qwen2")
    adapters = adapters_of(bundle, rng)
    large = Adapters(bundle.manifest, {n: a * 3e4 for n, a in adapters.tensors.items()})
    with pytest.raises(BundleError, match=r"proj.weight holds .* too large for float16"):
        write(bundle, large, tmp_path / "hf", "float16")
    assert listing(tmp_path) == []
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
        with pytest.raises(StorageError, match=r"hf needs about .*1 kB are free"):
            write(bundle, adapters, tmp_path / "hf")
    assert listing(tmp_path) == []
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        write(bundle, adapters, tmp_path / "hf")
    with pytest.raises(UsageError, match="not a checkpoint; it is not replaced"):
        write(bundle, adapters, tmp_path / "hf", force=True)
    assert listing(tmp_path) == ["hf", "hf/mine.txt"]


def test_a_checkpoint_that_is_there_is_replaced_by_force(
    tiny: Tiny, tmp_path: Path, rng: Rng
) -> None:
    bundle = tiny("qwen2")
    write(bundle, adapters_of(bundle, rng), tmp_path / "hf", shard_bytes=1)
    write(bundle, adapters_of(bundle, rng), tmp_path / "hf", force=True)
    assert listing(tmp_path / "hf") == ["config.json", "model.safetensors"]
    assert listing(tmp_path) == ["hf", "hf/config.json", "hf/model.safetensors"]
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"than those of a checkpoint \(notes.txt\)"):
        write(bundle, adapters_of(bundle, rng), tmp_path / "hf", force=True)
    assert (tmp_path / "hf" / "notes.txt").read_text() == "mine"
    assert listing(tmp_path) == ["hf", *(f"hf/{name}" for name in listing(tmp_path / "hf"))]


def test_experts_are_not_written_as_a_checkpoint(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("qwen3-moe")
    with (
        fused_model(bundle, adapters_of(bundle, rng)) as model,
        pytest.raises(UsageError, match=r"hold experts.*--to mlx.*--format bundle"),
    ):
        write_checkpoint(model, tmp_path / "m", "float32", ONE_FILE, False, silent)
    assert not (tmp_path / "m").exists()


def test_a_text_model_that_transformers_has_inside_of_another_alone_is_refused(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    """As Muse Glimmer's: there the class would add a tower of its own, with random weights."""
    bundle = tiny("qwen2")
    with fused_model(bundle, adapters_of(bundle, rng)) as model:
        model.family, model.provenance = "muse_glimmer", {INSIDE: "muse_glimmer_text"}
        with pytest.raises(UsageError, match=r"no class for muse_glimmer_text without.*--to peft"):
            write_checkpoint(model, tmp_path / "m", "float32", ONE_FILE, False, silent)
    assert not (tmp_path / "m").exists()
