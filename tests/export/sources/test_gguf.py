"""GGUF files: what a converter changed is changed back, and what is wrong is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from export.sources.families import build_model
from export.sources.gguf_config import ARCHITECTURES, llama3_factors
from export.sources.open import open_checkpoint
from export.sources.random import PRESETS
from export.sources.source import Checkpoint
from ondevice.errors import BundleError

Arrays = dict[str, np.ndarray]
ZEROS = np.zeros((128, 128), np.float32)


def whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.rows(name, 0, checkpoint.shape(name)[0])


def weights_of(preset: str) -> tuple[dict[str, Any], Arrays]:
    source = open_checkpoint(f"random:{preset}")
    return dict(source.config), {name: whole(source, name) for name in source.names()}


def to_llama_cpp(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """llama.cpp's converter, by its own tables: the name, the +1 of Gemma, llama's row order."""
    family = config["model_type"]
    arch = next(arch for arch, known in ARCHITECTURES.items() if known == family)
    arch_number = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[arch]
    mapped = gguf.get_tensor_name_map(arch_number, config["num_hidden_layers"]).get_name(
        name, try_suffixes=(".weight", ".bias")
    )
    assert mapped is not None
    if family == "gemma3_text" and name.endswith("norm.weight"):
        array = array + 1
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        array = split.swapaxes(1, 2).reshape(array.shape)
    return mapped, array


def write_gguf(path: Path, config: dict[str, Any], arrays: Arrays, **more: Any) -> Path:
    family = config["model_type"]
    arch = next(arch for arch, known in ARCHITECTURES.items() if known == family)
    writer = gguf.GGUFWriter(path, more.get("architecture", arch))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    if "change" not in more or family != "qwen2":
        writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    more.get("change", lambda _: None)(writer)
    for name, array in arrays.items():
        mapped, changed = to_llama_cpp(name, array, config)
        stored_as = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else more.get("stored_as")
        if stored_as is None:
            writer.add_tensor(mapped, changed.astype(np.float16))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(changed), stored_as)
            writer.add_tensor(mapped, packed, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny-")])
@pytest.mark.parametrize("stored_as", ["F32", "F16", "BF16", "Q8_0"])
def test_gguf_gives_back_the_original(tmp_path: Path, preset: str, stored_as: str) -> None:
    config, arrays = weights_of(preset)
    chosen = None if stored_as == "F16" else gguf.GGMLQuantizationType[stored_as]
    read = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", config, arrays, stored_as=chosen)))
    assert read.family == config["model_type"]
    assert read.names() == list(arrays)
    assert read.tokenizer_files() == {}
    for key, value in config.items():
        assert read.config[key] == value, key
    error = {"F32": 1e-7, "F16": 3e-4, "BF16": 2e-3, "Q8_0": 3e-3}[stored_as]
    for name, array in arrays.items():
        np.testing.assert_allclose(whole(read, name), array, atol=error)
        np.testing.assert_array_equal(read.rows(name, 3, 17), whole(read, name)[3:17])
    read.close()


def test_gguf_rope_scalings(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config["rope_theta"] = 5e5
    factors = llama3_factors(5e5, 32, scaling)

    def table(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    read = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", config, arrays, change=table)))
    assert read.config["rope_scaling"] == scaling
    model = build_model("llama", read.config)  # mlx-lm multiplies wavelengths where we divide
    plain = 5e5 ** (np.arange(0, 32, 2) / 32)
    rope = model.model.layers[0].self_attn.rope
    np.testing.assert_allclose(np.array(rope._freqs), plain * factors, rtol=1e-4)

    factors = factors + 1
    with pytest.raises(BundleError, match="not one of Llama 3's"):
        open_checkpoint(str(write_gguf(tmp_path / "b.gguf", config, arrays, change=table)))

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    read = open_checkpoint(str(write_gguf(tmp_path / "c.gguf", config, arrays, change=linear)))
    assert read.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_bad_gguf_files_are_refused(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    path = tmp_path / "m.gguf"
    with pytest.raises(BundleError, match="'mamba' is not supported; supported are gemma3, llama"):
        open_checkpoint(str(write_gguf(path, config, arrays, architecture="mamba")))
    with pytest.raises(BundleError, match="one of 3 parts"):
        open_checkpoint(
            str(write_gguf(path, config, arrays, change=lambda w: w.add_uint16("split.count", 3)))
        )
    with pytest.raises(BundleError, match=r"does not use: blk\.0\.extra"):
        open_checkpoint(
            str(
                write_gguf(
                    path, config, arrays, change=lambda w: w.add_tensor("blk.0.extra.weight", ZEROS)
                )
            )
        )
    with pytest.raises(BundleError, match="cannot be understood"):
        open_checkpoint(
            str(
                write_gguf(
                    path, config, arrays, change=lambda w: w.add_string("qwen2.rope.freq_base", "x")
                )
            )
        )
    without = {name: array for name, array in arrays.items() if "norm" not in name}
    with pytest.raises(BundleError, match=r"missing: model\.layers\.0"):
        open_checkpoint(str(write_gguf(path, config, without)))
    content = write_gguf(path, config, arrays).read_bytes()
    for size, message in ((10, "not even"), (200, "header asks for"), (-1000, "truncated")):
        path.write_bytes(content[:size])
        with pytest.raises(BundleError, match=message):
            open_checkpoint(str(path))
    norm = b"output_norm.weight"  # its name, dimensions, their sizes, type, and offset
    start = content.index(norm) + len(norm) + 4 + 8 + 4
    path.write_bytes(content[:start] + bytes(8) + content[start + 8 :])
    with pytest.raises(BundleError, match=r"starts at byte \d+, inside .*, which ends at \d+"):
        open_checkpoint(str(path))
    path.write_bytes(b"GGUX" + content[4:])
    with pytest.raises(BundleError, match="not a little-endian GGUF"):
        open_checkpoint(str(path))


def test_damaged_gguf_headers_never_escape(rng: np.random.Generator, tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "m.gguf", *weights_of("tiny-qwen2")).read_bytes())
    damaged = tmp_path / "d.gguf"
    for _ in range(150):
        copy = bytearray(content)
        for at in rng.integers(0, 900, 3):
            copy[at] = rng.integers(256)
        damaged.write_bytes(copy)
        try:
            open_checkpoint(str(damaged)).close()
        except BundleError:
            continue
