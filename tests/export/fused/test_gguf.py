"""Fused GGUF files: every tensor by a hand-written mapping, and logits of bundle and adapter."""

from __future__ import annotations

import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.adapters import saved_adapter, written
from support.files import listing
from support.fusing import dense, fused_model, read_again, silent
from support.llama_names import MATRICES, NORMS, OUTSIDE, in_llamas_order
from support.models import Rng, Tiny, adapters_of, each_family
from support.random_types import random_bundle
from support.runs import refuses

from export.fused.gguf import write_gguf
from export.fused.gguf_metadata import add_metadata, rope_tables
from export.fused.model import FusedCheckpoint
from export.sources.gguf_config import read_config
from export.sources.gguf_file import GGUFFile
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, UsageError
from runtime.methods.adapters import Adapters


def their_name(name: str, gemma: bool) -> str:
    base, _, end = name.rpartition(".")
    if base in OUTSIDE:
        return f"{OUTSIDE[base]}.{end}"
    layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base).groups()
    if gemma and part == "post_attention_layernorm":
        return f"blk.{layer}.post_attention_norm.{end}"
    return f"blk.{layer}.{(MATRICES | NORMS)[part]}.{end}"


def their_values(bundle: Bundle, name: str, values: np.ndarray) -> np.ndarray:
    """Gemma's norms with their 1; the rows of Llama's queries and keys in its order."""
    manifest = bundle.manifest
    if manifest.family == "gemma3_text" and "norm" in name:
        return values + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if manifest.family != "llama" or part not in heads:
        return values
    return in_llamas_order(values, manifest.config[heads[part]])


def write(bundle: Bundle, adapters: Adapters, output: Path, dtype: str = "float32") -> Path:
    with fused_model(bundle, adapters) as model:
        return write_gguf(model, output, dtype, False, silent)


@each_family
def test_every_tensor_lies_where_llama_cpp_looks_for_it(
    tiny: Tiny, tmp_path: Path, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    path = write(bundle, adapters, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    found = {one.name: one for one in reader.tensors}
    with fused_model(bundle, adapters) as model:
        names = {name: their_name(name, family == "gemma3") for name in model.names()}
        assert set(found) == set(names.values())
        for name, theirs in names.items():
            values = (
                model.rows(name, 0, model.shape(name)[0])
                if name in bundle.manifest.vectors
                else dense(bundle, adapters, name.removesuffix(".weight"))
            )
            expected = their_values(bundle, name, values)
            assert found[theirs].tensor_type == gguf.GGMLQuantizationType.F32
            assert list(found[theirs].shape) == list(reversed(values.shape))
            np.testing.assert_allclose(
                found[theirs].data, expected, rtol=0, atol=2e-6 * np.abs(expected).max()
            )


@each_family
def test_read_again_it_has_the_logits_of_bundle_and_adapter(
    tiny: Tiny, tmp_path: Path, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    path = write(bundle, adapters, tmp_path / "folder")
    assert listing(tmp_path) == ["folder", "folder/model.gguf"]
    config = read_again(path, bundle, adapters, rng).manifest.config
    assert {key: config.get(key) for key in bundle.manifest.config} == bundle.manifest.config | {
        key: value for key, value in config.items() if key == "rope_scaling"
    }


AT_LENGTH = (  # scales, filters, parts of heads, norms that add 1, GPT's names, sinks and others
    *("granite", "granitemoe", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "lfm2", "glm4"),
    *("nemotron", "gpt2", "cohere2", "olmo3", "exaone4", "phi", "gpt_bigcode"),
    # tensors of all layers, and other orders of heads; biases of routers, and first layers without
    *("gemma4_text", "qwen3_5", "gpt_neox", "glm4_moe", "afmoe", "minimax_m2"),
    "apertus",  # numbers of an activation, which are metadata
)


# windows, caps and norms that add 1; turned, and experts; matrices that transformers has joined
@pytest.mark.parametrize(
    "model_type",
    [
        "gemma2",
        "mixtral",
        "granitemoehybrid",
        *(pytest.param(name, marks=pytest.mark.slow) for name in AT_LENGTH),
    ],
)
def test_other_architectures_are_read_again_with_their_adapter(
    tmp_path: Path, rng: Rng, model_type: str
) -> None:
    """An adapter's file adds to the model's file what fusing adds."""
    bundle = random_bundle(tmp_path, model_type)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours")
    fused, plain = (tmp_path / f"{name}.gguf" for name in ("fused", "plain"))
    write(bundle, adapters, fused)
    with FusedCheckpoint(bundle, {}) as model:
        write_gguf(model, plain, "float32", False, silent)
    read_again(fused, bundle, adapters, rng)
    file = GGUFFile(written(bundle, tmp_path / "ours", "gguf", tmp_path / "adapter.gguf"))
    before, after = GGUFFile(plain), GGUFFile(fused)
    scale = file.metadata["adapter.lora.alpha"] / adapters.manifest.lora.rank
    changed = {name.rpartition(".")[0] for name in file.tensors}
    for name in after.tensors:
        a, b = (f"{name}.lora_{part}" for part in "ab")
        added = (
            scale * file.rows(b, slice(None)) @ file.rows(a, slice(None)) if name in changed else 0
        )
        found = after.rows(name, slice(None)) - before.rows(name, slice(None))
        assert np.abs(found - added).max() <= 1e-5, name
    assert changed <= after.tensors.keys() and len(changed) == len(adapters.tensors) // 2


def test_minicpm3_is_read_again_and_its_adapter_alone_refused(tmp_path: Path, rng: Rng) -> None:
    """llama.cpp multiplies by the matrices of its attention without adapters."""
    bundle = random_bundle(tmp_path, "minicpm3")
    adapters = saved_adapter(bundle, rng, tmp_path / "ours")
    read_again(write(bundle, adapters, tmp_path / "fused.gguf"), bundle, adapters, rng)
    to = ("adapter", tmp_path / "ours", "--bundle", bundle.path, "--to", "gguf")
    said = "q_a_proj without its adapter; ondevice fuse --format gguf"
    refuses(2, said, *to, "-o", tmp_path / "no.gguf")
    saved_adapter(bundle, rng, tmp_path / "others", targets=("o_proj", "up_proj"))
    written(bundle, tmp_path / "others", "gguf", tmp_path / "others.gguf")


TURNED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers"),
        ("minicpm3", {"scale_depth": 1.0}, "scale_depth 1.0"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma3_text", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64"),
                (
                    "granitemoehybrid",
                    {"position_embedding_type": "nope"},
                    "position_embedding_type",
                ),
                ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
                ("qwen3_5", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
                ("qwen3_5", {"linear_value_head_dim": 32}, "linear_key_head_dim 16"),
                ("gemma4_text", {"rope_parameters": TURNED}, "rope_parameters of full_attention"),
            )
        ),
    ],
)
def test_settings_that_a_file_cannot_say_are_refused_by_name(
    tmp_path: Path, model_type: str, change: dict[str, object], said: str
) -> None:
    with (
        FusedCheckpoint(random_bundle(tmp_path, model_type, **change), {}) as model,
        pytest.raises(UsageError, match=f"--format gguf: the model has {said}"),
    ):
        write_gguf(model, tmp_path / "model.gguf", "float32", False, silent)
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_only_matrices_are_rounded(
    tiny: Tiny, tmp_path: Path, rng: Rng, dtype: str, bound: float
) -> None:
    bundle = tiny("gemma3")
    path = write(bundle, adapters_of(bundle, rng), tmp_path / "model.gguf", dtype)
    exact = write(bundle, adapters_of(bundle, rng), tmp_path / "exact.gguf")
    rounded, full = GGUFFile(path), GGUFFile(exact)
    short = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    for name, tensor in rounded.tensors.items():
        assert tensor.type.name == (short if len(tensor.shape) == 2 else "F32"), name
    name = "token_embd.weight"  # no adapter changes it
    found, expected = (one.rows(name, slice(None)) for one in (rounded, full))
    assert 0 < (np.abs(found - expected) / np.maximum(np.abs(expected), 1e-3)).max() <= bound


def test_a_file_that_is_there_is_replaced_by_force_alone(
    tiny: Tiny, tmp_path: Path, rng: Rng
) -> None:
    bundle = tiny("qwen2")
    path = write(bundle, adapters_of(bundle, rng), tmp_path / "model.gguf")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        write(bundle, adapters_of(bundle, rng), path)
    with fused_model(bundle, adapters_of(bundle, rng)) as model:
        write_gguf(model, path, "float32", True, silent)
        assert path.read_bytes() != before and listing(tmp_path) == ["model.gguf"]
        (tmp_path / "folder.gguf").mkdir()
        with pytest.raises(UsageError, match="not a GGUF file"):
            write_gguf(model, tmp_path / "folder.gguf", "float32", True, silent)
        other = tmp_path / "other.gguf"
        for mine in (b"mine", path.read_bytes().replace(b"general.type", b"general.kind")):
            other.write_bytes(mine)
            with pytest.raises(UsageError, match="not a GGUF file of a model"):
                write_gguf(model, other, "float32", True, silent)
            assert other.read_bytes() == mine


def test_a_folder_with_other_files_is_not_replaced(tiny: Tiny, tmp_path: Path, rng: Rng) -> None:
    bundle = tiny("qwen2")
    models = tmp_path / "models"
    with fused_model(bundle, adapters_of(bundle, rng)) as model:
        write_gguf(model, models, "float32", False, silent)
        (models / ".DS_Store").touch()
        write_gguf(model, models, "float32", True, silent)
        assert listing(models) == ["model.gguf"]
        (models / "another.gguf").write_bytes(b"mine")
        with pytest.raises(UsageError, match=r"holds other files .* \(another.gguf\)"):
            write_gguf(model, models, "float32", True, silent)
    assert listing(models) == ["another.gguf", "model.gguf"]
    assert (models / "another.gguf").read_bytes() == b"mine"


def config_of(**more: object) -> dict[str, object]:
    return {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2,
        "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 5e5, **more,
    }  # fmt: skip


def written_config(
    path: Path, arch: str, family: str, config: dict[str, object], factor: float | None = None
) -> dict:
    """A configuration as our reader finds it in a file of it, with an embedding alone."""
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, family, config, 8)
    if factor is not None:
        writer.add_rope_scaling_factor(factor)
    writer.add_tensor("token_embd.weight", np.zeros((8, 128), np.float32))
    for name, table in rope_tables(config).items():
        writer.add_tensor(name, table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_config(GGUFFile(path), "the file")


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, LINEAR])
def test_scalings_of_positions_are_read_back(tmp_path: Path, scaling: object) -> None:
    config = config_of(rope_scaling=scaling)
    found = written_config(tmp_path / "model.gguf", "llama", "llama", config)
    assert found.get("rope_scaling") == (pytest.approx(scaling) if scaling == LLAMA3 else scaling)


def test_a_scaling_by_length_is_read_for_the_original_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + i for i in range(16)]}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 2048, **factors}
    config = config_of(model_type="phi3", rope_scaling=scaling)
    found = written_config(tmp_path / "model.gguf", "phi3", "phi3", config)
    assert found["max_position_embeddings"] == 2048
    factor = math.sqrt(1 + math.log(4) / math.log(2048))  # of a length of 8,192
    assert found["rope_scaling"] == {**scaling, "attention_factor": pytest.approx(factor, 1e-6)}
    with pytest.raises(BundleError, match=r"rope_factors_short\.weight beside .* with factor 4"):
        written_config(tmp_path / "other.gguf", "phi3", "phi3", config, 4.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": YARN | {"beta_fast": 16}}, "yarn with beta_fast 16"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types sliding_attention"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(
    tmp_path: Path, change: dict, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        written_config(tmp_path / "model.gguf", "llama", "llama", config_of(**change))
