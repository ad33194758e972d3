"""Model sources: what was written is what is read, and what is wrong is refused by name."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
import transformers
from mlx_lm.models import qwen3_moe
from model_types.tiny import tiny
from support.checkpoints import (
    Arrays,
    is_refused,
    quantized,
    weights_of,
    whole,
    write_folder,
    write_weights,
)
from support.mutations import mutate, mutate_bytes

from export.cut.unread import refuse_unread
from export.sources.families import (
    build_model,
    completed_config,
    expected_shapes,
    normalise_config,
    transformers_config,
)
from export.sources.open import open_checkpoint
from export.sources.random import PRESETS
from export.sources.safetensors_files import FLOAT_TYPES, SafetensorsFile
from export.sources.settings import (
    WRAPPER_USED,
    neutral_in_wrapper,
    unknown_settings,
    used_settings,
)
from export.sources.source import turned
from export.stored import QuantizedForm
from runtime.adapters.fused import IN_CONFIG
from runtime.adapters.origins import RENAMED
from runtime.core.errors import BundleError, UsageError

TINY = [name for name in PRESETS if name.startswith("tiny-")]


def write_shards(folder: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(arrays)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{shard:05}-of-00002.safetensors"
        write_weights(folder / file, {name: arrays[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# --- Hugging Face folders ---------------------------------------------------------------------


@pytest.mark.parametrize("preset", TINY)
def test_folder_gives_back_what_was_written(tmp_path: Path, preset: str) -> None:
    config, arrays = weights_of(preset)
    written = transformers_config(config["model_type"], config, "float32")
    with open_checkpoint(str(write_folder(tmp_path / "m", written, arrays))) as read:
        assert read.names() == list(arrays)
        assert read.family == config["model_type"]
        for name, array in arrays.items():
            assert read.shape(name) == array.shape
            assert read.quantized_form(name) is None
            np.testing.assert_array_equal(whole(read, name), array)
            last = min(17, len(array))  # a router has as many rows as there are experts
            np.testing.assert_array_equal(read.rows(name, min(3, last), last), array[3:last])
        json.dumps(read.provenance)


def test_rows_outside_a_tensor_are_an_error() -> None:
    read = open_checkpoint("random:tiny-qwen2")
    with pytest.raises(ValueError, match="128"):
        read.rows("model.norm.weight", 0, 129)
    with pytest.raises(BundleError, match="no tensor"):
        read.shape("lm_head.weight")
    with pytest.raises(BundleError, match="not quantized"):
        read.quantized_rows("model.norm.weight", 0, 1)


def test_shards_and_tokenizer_files(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    folder = write_shards(tmp_path / "m", config, arrays)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "chat_template.jinja").write_bytes(b"hello")
    read = open_checkpoint(str(folder))
    for name, array in arrays.items():
        np.testing.assert_array_equal(whole(read, name), array)
    assert read.tokenizer_files() == {"tokenizer.json": b"{}", "chat_template.jinja": b"hello"}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precisions_widen_exactly(tmp_path: Path, dtype: mx.Dtype) -> None:
    config, arrays = weights_of("tiny-qwen3")
    halves = {name: mx.array(array).astype(dtype) for name, array in arrays.items()}
    read = open_checkpoint(str(write_folder(tmp_path / "m", config, halves)))
    for name, half in halves.items():
        np.testing.assert_array_equal(whole(read, name), np.array(half.astype(mx.float32)))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("bits", "other_bits"), [(4, 8), (2, 3), (5, 6), (6, 2)])
def test_mlx_quantized_with_overrides(
    tmp_path: Path, dtype: mx.Dtype, bits: int, other_bits: int
) -> None:
    config, arrays = weights_of("tiny-qwen2")
    config["quantization"] = {"group_size": 64, "bits": bits}
    override = "model.layers.1.mlp.down_proj"
    config["quantization"][override] = {"group_size": 32, "bits": other_bits}
    config["quantization_config"] = config["quantization"]
    stored: dict[str, mx.array] = {}
    for name, array in arrays.items():
        base = name.removesuffix(".weight")
        if array.ndim == 1:
            stored[name] = mx.array(array).astype(dtype)
            continue
        group, own = (32, other_bits) if base == override else (64, bits)
        stored |= quantized(name, mx.array(array).astype(dtype), group_size=group, bits=own)
    read = open_checkpoint(str(write_folder(tmp_path / "m", config, stored)))
    assert read.names() == list(arrays)
    assert "quantization" not in read.config
    assert read.quantized_form("model.norm.weight") is None
    for name in (f"{override}.weight", "model.embed_tokens.weight"):
        group, own = (32, other_bits) if override in name else (64, bits)
        form = read.quantized_form(name)
        kept = "float16" if dtype == mx.float16 else "float32"
        assert form == QuantizedForm(4 if own <= 4 else 8, group, "affine", kept)
        parts = [stored[name.removesuffix("weight") + p] for p in ("weight", "scales", "biases")]
        wide = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
        oracle = mx.dequantize(*wide, group_size=group, bits=own)
        assert read.shape(name) == oracle.shape == arrays[name].shape
        np.testing.assert_allclose(
            read.rows(name, 5, 40), np.array(oracle)[5:40], rtol=1e-6, atol=1e-7
        )
        got = read.quantized_rows(name, 5, 40)
        np.testing.assert_array_equal(got.values(form), read.rows(name, 5, 40))
        np.testing.assert_array_equal(got.scales, np.array(wide[1])[5:40])
        np.testing.assert_array_equal(got.biases, np.array(wide[2])[5:40])
        if own in (4, 8):
            np.testing.assert_array_equal(got.words, np.array(parts[0])[5:40])
        mlx_packed = [mx.array(part) for part in (got.words, got.scales, got.biases)]
        again = mx.dequantize(*mlx_packed, group_size=group, bits=form.bits, dtype=mx.float32)
        if dtype != mx.float16:
            np.testing.assert_array_equal(np.array(again), np.array(oracle)[5:40])


def test_multimodal_gemma_is_its_text_half(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-gemma3")
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    for key in (
        "rope_theta",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "tie_word_embeddings",
    ):
        del config[key]
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {
        **config,
        "rope_parameters": rope,
        "layer_types": layer_types,
        "model_type": "gemma3_text",
    }
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"image_size": 896}}
    outer |= {"mm_tokens_per_image": 256, "boi_token_index": 300}
    for prefix in ("language_model.model.", "model.language_model."):
        renamed: dict[str, Any] = {prefix + n.removeprefix("model."): a for n, a in arrays.items()}
        renamed["vision_tower.patch.weight"] = np.zeros((4, 4), np.float32)
        read = open_checkpoint(str(write_folder(tmp_path / "m", outer, renamed)))
        assert read.family == "gemma3_text"
        assert read.warnings == []
        assert read.config["rope_theta"] == 5e5
        assert read.config["rope_local_base_freq"] == 2e4
        assert read.config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        assert read.config["sliding_window_pattern"] == 2
        assert read.config["tie_word_embeddings"] is True
        for name, array in arrays.items():
            np.testing.assert_array_equal(whole(read, name), array)


def test_a_tied_models_copy_of_its_embedding_is_ignored(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    more = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    assert open_checkpoint(str(write_folder(tmp_path / "m", config, more))).names() == list(arrays)


def test_nested_rope_and_silent_tying() -> None:
    raw = {**PRESETS["tiny-llama"], "tie_word_embeddings": None, "rope_theta": None}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw["rope_parameters"] = {"rope_theta": 5e5, **llama3}
    config = normalise_config(raw, "x", has_lm_head=True)
    assert config["rope_theta"] == 5e5
    # without a length of its own, a scaling starts from the longest sequence
    length = {"original_max_position_embeddings": config["max_position_embeddings"]}
    assert config["rope_scaling"] == {**llama3, **length}
    assert config["tie_word_embeddings"] is False
    build_model("llama", config)
    raw["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert "rope_scaling" not in normalise_config(raw, "x", has_lm_head=True)


# --- refusals ---------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, arrays: arrays.__delitem__(name)


def put(**settings: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, arrays: config.update(settings)


def add(arrays: Arrays, **settings: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, known: (config.update(settings), known.update(arrays))[1]


@pytest.mark.parametrize(
    ("model_type", "setting", "message"),
    [
        ("apertus", {"hidden_act": "silu"}, "'silu': mlx-lm's apertus computes with xielu alone"),
        ("gpt2", {"activation_function": "xielu"}, "'xielu': mlx-lm's gpt2 does not compute with"),
    ],
)
def test_an_activation_that_a_class_has_not_is_said_before_its_tensors(
    tmp_path: Path, model_type: str, setting: dict[str, Any], message: str
) -> None:
    raw = tiny(model_type, **setting)
    config = normalise_config(raw, "x", not raw["tie_word_embeddings"])
    shapes = {
        name: shape
        for name, shape in expected_shapes(model_type, config).items()
        if "act_" not in name
    }
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    is_refused(write_folder(tmp_path / "model", raw, arrays), message)


ZEROS = np.zeros((128, 128), np.float32)
UP, NORM = "model.layers.0.mlp.up_proj", "model.norm.weight"
SCALES = {f"{UP}.scales": ZEROS}
QUANTIZED = {"bits": 4, "group_size": 64}
CAUSAL = "AutoModelForCausalLM"
QUANTIZATIONS = ("quantization", "quantization_config")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_NORM = {NORM: np.zeros(128, np.uint32)}
OF_NORM |= {f"model.norm.{part}": np.zeros(2, np.float32) for part in ("scales", "biases")}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put(model_type="none"), "'none' is not supported: mlx-lm has no class for it"),
        (put(model_type=None), "model_type is None and names"),
        (put(hidden_size=0), "hidden_size"),
        (put(num_hidden_layers=10**9), "from 1 to 1024"),
        (put(hidden_act="relu"), "hidden_act = 'relu'"),
        (put(num_attention_heads=0), "num_attention_heads"),
        (put(rope_scaling={"rope_type": "magic"}), "rope_type 'magic'"),
        (put(rms_norm_eps={}), "'rms_norm_eps' expected float, got dict"),
        (put(model_type=[]), r"model_type is \[\] and names no architecture"),
        (put(rope_parameters=[1]), r"'rope_parameters' with value \[1\] .* \(RopeParameters, dict"),
        (put(rope_theta=0), "rope_theta must be a positive number, is 0"),
        *((put(**{key: []}), f"{key} must be an object, is ") for key in QUANTIZATIONS),
        *(
            (put(rope_scaling={**LLAMA3, **wrong}), f"with {setting}; correct it as in the")
            for wrong, setting in (
                ({"low_freq_factor": []}, r"rope_scaling.low_freq_factor = \[\]"),
            )
        ),
        (put(rope_scaling={**LLAMA3, "original_max_position_embeddings": 0}), "number, is 0"),
        (put(vocab_size=10**30), "vocab_size is 10*, not a finite number of 64 bits"),
        (put(vocab_size=2**62), "with vocab_size = 4611686018427387904; correct it"),
        (put(auto_map={CAUSAL: "modeling_mine.MineForCausalLM"}), "may be another than Qwen2ForCa"),
        (put(model_file="mine.py"), "model_file = 'mine.py' is code of the checkpoint's own"),
        (put(auto_map={CAUSAL: "m.Qwen2ForCausalLM"}, model_file="mine.py"), "model_file = 'mine"),
        (put(num_labels=10**30, id2label=[], torch_dtype=["x"]), None),
        (put(model_max_length=10**30), None),
        (drop("model.norm.weight"), "1 of .* missing: model.norm.weight"),
        (put(intermediate_size=256), "wrong shape.*implies"),
        (add({"model.layers.0.self_attn.sinks.weight": ZEROS}), "does not use"),
        (add({NORM: np.zeros(128, np.int32)}), "type I32"),
        (
            add({f"{UP}.qweight": OF_NORM[NORM]}, quantization_config={"quant_method": "awq"}),
            "quantized by 'awq'",
        ),
        *(
            (add(SCALES, quantization=QUANTIZED | other), "supported are affine")
            for other in ({"bits": 7}, {"mode": "mxfp4"}, {"group_size": 16})
        ),
        # settings of one matrix replace those of all, as mlx-lm has it
        (
            add(SCALES, quantization={"mode": "mxfp4", "bits": 4, UP: {"bits": 7}}),
            "mode 'affine', bits 7, group_size 64; supported",
        ),
        (add(SCALES, quantization=QUANTIZED | {UP: False}), "up_proj must be an object, is False"),
        (
            add(OF_NORM, quantization=QUANTIZED),
            r"norm\.weight is missing or no matrix of U32",
        ),
        (put(logits_scaling=8.0), "logits_scaling = 8.0 is not supported for qwen2"),
        (put(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (put(head_dim=64), "head_dim = 64: mlx-lm's qwen2 does not"),
        (put(rope_theta="1e4"), "rope_theta must be a positive number, is '1e4'"),
        (put(rms_norm_eps=True), "'rms_norm_eps' expected float, got bool"),
        (put(rope_traditional=True), "rope_traditional = True"),
        (put(rope_theta=math.inf), "rope_theta is inf, not a finite number"),
        (put(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (put(quantization=QUANTIZED), None),
        (add(SCALES), "without a 'quantization'"),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, spoil: Any, message: str | None) -> None:
    config, arrays = weights_of("tiny-qwen2")
    spoil(config, arrays)
    folder = write_folder(tmp_path / "m", config, arrays)

    def read() -> None:
        checkpoint = open_checkpoint(str(folder))
        refuse_unread(checkpoint.family, checkpoint.config, checkpoint.given, "x")

    if message is None:
        read()
        return
    with pytest.raises(BundleError, match=message) as caught:
        read()
    assert caught.value.exit_code == 4


def test_a_setting_that_a_class_needs_is_asked_for(tmp_path: Path) -> None:
    raw = tiny("minicpm", hidden_size=None)
    _, arrays = weights_of("tiny-qwen2")
    is_refused(
        write_folder(tmp_path / "m", raw, arrays),
        r"minicpm cannot be built .*: it needs 'hidden_size'$",
    )


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("qwen2.Qwen2ForCausalLM", {CAUSAL: "qwen2.Qwen2ForCausalLM"}),
        ("a/b--modeling.QWEN_2_ForCausalLM", {CAUSAL: ["a/b--modeling.QWEN_2_ForCausalLM", None]}),
        ("m.Bidirectional", {"AutoConfig": "m.Config", "AutoModel": "m.Bidirectional"}),
    ],
)
def test_code_of_a_checkpoint_is_said_not_to_be_run(
    tmp_path: Path, code: str, named: dict[str, object]
) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_folder(tmp_path / "m", {**config, "auto_map": named}, arrays)
    (warning,) = open_checkpoint(str(folder)).warnings
    assert f"auto_map = {code!r} is code of the checkpoint's own, which is never run" in warning


def test_quantized_parts_must_agree(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    config["quantization"] = QUANTIZED
    base = UP
    stored = quantized(base, mx.array(arrays[f"{base}.weight"]), group_size=32, bits=4)
    arrays |= {name: np.array(array) for name, array in stored.items()}
    folder = write_folder(tmp_path / "m", config, arrays)
    is_refused(folder, r"groups of 64 imply \(192, 2\): config.json is")
    del arrays[f"{base}.biases"]
    is_refused(write_folder(folder, config, arrays), "biases is missing")
    del arrays[f"{base}.scales"]
    is_refused(
        write_folder(folder, config, arrays), rf"\(U32\) without {base}.scales; the download"
    )


def test_weights_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_shards(tmp_path / "m", config, arrays)
    (name, *_), file = sorted(arrays), "model-00002-of-00002.safetensors"
    again = {name: arrays[name], **{key: arrays[key] for key in sorted(arrays)[1::2]}}
    write_weights(folder / file, again)
    is_refused(folder, f"{name} is in model-00001-of-00002.safetensors and in")


@pytest.mark.parametrize("has_index", [True, False])
def test_a_single_file_is_read_alone(tmp_path: Path, has_index: bool) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_shards(tmp_path / "m", config, arrays)
    whole = {name: array + 1 for name, array in arrays.items()}  # its values are other ones
    write_weights(folder / "model.safetensors", whole)
    (folder / "model-00002-of-00002.safetensors").unlink()  # which is not needed then
    if not has_index:
        (folder / "model.safetensors.index.json").unlink()
    with open_checkpoint(str(folder)) as read:
        for name, array in whole.items():
            np.testing.assert_array_equal(read.rows(name, 0, len(array)), array)
        assert [file["name"] for file in read.provenance["files"]] == ["model.safetensors"]
        (warned,) = read.warnings
    assert "model.safetensors is read alone" in warned
    assert warned.endswith("without model-00001-of-00002.safetensors")  # the others are not there


def test_a_single_file_that_is_not_the_whole_model_is_refused_beside_an_index(
    tmp_path: Path,
) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_shards(tmp_path / "m", config, arrays)
    fewer = dict(arrays)
    del fewer["model.norm.weight"]
    write_weights(folder / "model.safetensors", fewer)
    lacks = f"lacks 1 of the {len(arrays)} tensors of .*index.json, such as model.norm.weight"
    is_refused(folder, lacks)
    (folder / "model.safetensors").unlink()
    assert not open_checkpoint(str(folder)).warnings


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_shards(tmp_path / "m", config, arrays)
    index = folder / "model.safetensors.index.json"
    second = folder / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-100])
    is_refused(folder, f"{second.name}: truncated .* not fully covered")
    for size in (4, 30):
        second.write_bytes(content[:size])
        is_refused(folder, "truncated")
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    is_refused(folder, f"{second.name}: it is a pointer of Git LFS: fetch")
    second.write_bytes(struct.pack("<Q", 8) + b"not json")
    is_refused(folder, "invalid JSON")
    second.unlink()
    is_refused(folder, f"{second.name} is missing")
    kept = index.read_text()
    index.unlink()  # the first shard's name says that there is a second
    is_refused(folder, f"{second.name} is missing")
    index.write_text(kept.replace(f'"{second.name}"', "3", 1))
    is_refused(folder, "weight is in 3, no file")
    index.write_text(kept.replace(second.name, "../" + second.name))
    is_refused(folder, "not a plain file name")
    index.write_text(kept.replace(second.name, "model-00001-of-00002.safetensors"))
    is_refused(folder, "does not hold it")
    (folder / "config.json").write_text("[" * 100_000)
    is_refused(folder, r"config\.json: not JSON")
    with (folder / "config.json").open("wb") as file:
        file.truncate(65 << 20)  # a sparse file
    is_refused(folder, r"config\.json has 68,157,440 bytes")
    (folder / "config.json").unlink()
    is_refused(folder, r"config\.json: missing")


def test_folders_without_weights_of_transformers(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_folder(tmp_path / "m", config, arrays)
    weights = folder / "model.safetensors"
    for name, way_out in [
        ("consolidated.safetensors", "consolidated.safetensors is of another program; get"),
        ("pytorch_model.bin", "pickled weights are not read: transformers' save_pretrained"),
        ("notes.txt", "the download may be incomplete"),
    ]:
        weights = weights.rename(folder / name)
        is_refused(folder, rf"no model\*\.safetensors; {way_out}")
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    is_refused(folder, "model_type is None and names no architecture")


def safetensors_bytes(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header_of(**tensors: tuple[str, list[int], list[int]]) -> bytes:
    keys = ("dtype", "shape", "data_offsets")
    fields = {name: dict(zip(keys, values, strict=True)) for name, values in tensors.items()}
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    {
        "wrong size": (header_of(a=("F32", [4], [0, 8])), "invalid shape, data type, or offset"),
        "overlap": (header_of(a=("F32", [2], [0, 8]), b=("F32", [1], [4, 8])), "tensor `b`"),
        "hole": (header_of(a=("F32", [1], [0, 4]), b=("F32", [0], [8, 8])), "tensor `b`"),
        "rest": (header_of(a=("F32", [1], [0, 4])), "not fully covered"),
        "no such type": (header_of(a=("Q4", [2], [0, 8])), "unknown variant `Q4`"),
        "too many": (header_of(a=("F32", [2**62, 8], [0, 8])), "overflow"),
        "below nothing": (header_of(a=("F32", [-2], [0, 8])), "integer `-2`"),
        "not UTF-8": (b'{"\xff": 1}', "UTF-8"),
        "a list": (b"[]", "JSON"),
    }.values(),
)
def test_inconsistent_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_folder(tmp_path / "m", *weights_of("tiny-qwen2"))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(content, bytes(8)))
    is_refused(folder, f"damaged, [0-9]+ bytes .*{message}.*download it again")


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder = write_folder(tmp_path / "m", config, arrays)
    small = header_of(**{"model.norm.weight": ("F8_E4M3", [8], [0, 8])})
    (folder / "model.safetensors").write_bytes(safetensors_bytes(small, bytes(8)))
    is_refused(folder, r"model\.norm\.weight has type F8_E4M3; supported are F32")


def damaged(good: bytes, rng: np.random.Generator) -> bytes:
    """A safetensors file with other bytes before its data, other fields, or cut short."""
    size = struct.unpack("<Q", good[:8])[0]
    header, tensors = good[8 : 8 + size], good[8 + size :]
    way = rng.integers(3)
    if way == 0:
        return mutate_bytes(good, rng, 8 + size)[0]
    if way == 1:
        fields = json.loads(header)
        mutate(fields, rng)
        return safetensors_bytes(json.dumps(fields).encode(), tensors)
    return good[: rng.integers(len(good))]


def test_a_damaged_file_is_read_or_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a": mx.ones((4, 6), mx.bfloat16), "b": mx.ones((4,), mx.float16)}
    mx.save_safetensors(str(path), {**tensors, "c": mx.ones((3, 4), mx.uint32)})
    good = path.read_bytes()
    refused = 0
    for _ in range(500):
        path.write_bytes(damaged(good, rng))
        try:
            file = SafetensorsFile(path)
        except BundleError:
            refused += 1
            continue
        for tensor in file.tensors.values():
            if tensor.dtype in (*FLOAT_TYPES, "U32") and tensor.shape:
                assert tensor.rows(0, tensor.shape[0]).shape == tensor.shape
    assert refused > 250


def test_bad_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(PRESETS["tiny-qwen2"]))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    for source, message in {
        "no/such/folder": "no such folder",
        str(tmp_path / "absent.gguf"): "no such folder",
        str(tmp_path / "model.bin"): "must be a .gguf",
        "random:huge": "no preset 'huge'.*tiny-llama",
        "some-org/some-model": "cannot be fetched .*no route to host",
    }.items():
        with pytest.raises(UsageError, match=message):
            open_checkpoint(source)
    is_refused(tmp_path / "pickled", "pickled")


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "abc123", *weights_of("tiny-qwen2"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kw: str(folder))
    provenance = open_checkpoint("org/name").provenance
    assert (provenance["name"], provenance["revision"]) == ("org/name", "abc123")


# --- random weights ---------------------------------------------------------------------------


def test_random_rows_do_not_depend_on_slices() -> None:
    first = open_checkpoint("random:tiny-llama")
    second = open_checkpoint("random:tiny-llama", seed=1)
    name = "model.embed_tokens.weight"
    table = whole(first, name)
    for start, stop in ((0, 1), (63, 65), (17, 200), (319, 320), (5, 5)):
        np.testing.assert_array_equal(first.rows(name, start, stop), table[start:stop])
    assert not np.array_equal(whole(second, name), table)
    assert table.std() == pytest.approx(128**-0.5, rel=0.02)
    assert not np.array_equal(table, whole(first, "lm_head.weight"))
    assert whole(first, "model.norm.weight").mean() == pytest.approx(1, abs=0.02)
    gemma = open_checkpoint("random:tiny-gemma3")
    assert whole(gemma, "model.norm.weight").mean() == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen3-0.6b": 596_049_920,
        "llama-135m": 134_515_008,
        "gemma3-270m": 268_098_176,
        "gemma3-1b": 999_885_952,
        "gemma3-4b": 3_880_263_168,
        "smollm3-3b": 3_075_098_624,
        "phi-4-mini": 3_836_021_760,
        "granite-4.0-1b": 1_631_750_144,
        "opt-1.3b": 1_315_758_080,
    }.items(),
)
def test_presets_have_the_published_sizes(preset: str, parameters: int) -> None:
    source = open_checkpoint(f"random:{preset}")
    assert sum(prod(source.shape(name)) for name in source.names()) == parameters


# --- what is read otherwise than it says ------------------------------------------------------


def test_a_head_of_its_own_is_used_though_the_configuration_says_tied(tmp_path: Path) -> None:
    """As in transformers, which ties the two only where they are equal."""
    config, arrays = weights_of("tiny-qwen2")
    assert config["tie_word_embeddings"] is True
    embedding = arrays["model.embed_tokens.weight"]
    equal = write_folder(tmp_path / "equal", config, {**arrays, "lm_head.weight": embedding})
    with open_checkpoint(str(equal)) as read:
        assert "lm_head.weight" not in read.names()
        assert not read.warnings
    own = embedding.copy()
    own[-1, -1] += 1
    differs = write_folder(tmp_path / "differs", config, {**arrays, "lm_head.weight": own})
    with open_checkpoint(str(differs)) as read:
        np.testing.assert_array_equal(whole(read, "lm_head.weight"), own)
        assert read.config["tie_word_embeddings"] is False
        (warning,) = read.warnings
        assert "lm_head.weight is not the embedding" in warning


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_a_class_has_no_place_for_must_be_the_embedding(
    tmp_path: Path, tied: bool
) -> None:
    config = {**tiny("gpt2"), "tie_word_embeddings": tied}
    arrays = {
        name.replace("model.", "transformer."): np.zeros(shape[::-1] if ".c_" in name else shape)
        for name, shape in expected_shapes("gpt2", normalise_config(config, "x", False)).items()
    }
    head = {"lm_head.weight": arrays["transformer.wte.weight"] + np.float32(not tied)}
    folder = str(write_folder(tmp_path / "m", config, {**arrays, **head}))
    if not tied:
        is_refused(folder, r"lm_head\.weight is not the embedding, which")
        return
    with open_checkpoint(folder) as read:
        assert read.warnings == []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_says_untied_needs_its_head(tmp_path: Path, family: str) -> None:
    """transformers would give it a random one."""
    config, arrays = weights_of(f"tiny-{family}")
    arrays.pop("lm_head.weight", None)
    untied = config | {"tie_word_embeddings": False}
    is_refused(write_folder(tmp_path / "m", untied, arrays), r"lm_head\.weight")
    if family == "gemma3":  # which is tied where it says nothing
        del untied["tie_word_embeddings"]
        with open_checkpoint(str(write_folder(tmp_path / "m", untied, arrays))) as read:
            assert read.config["tie_word_embeddings"]


def test_what_a_checkpoint_says_in_vain_is_a_warning(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    config |= {
        "quantization_config": {"quant_method": "bitsandbytes"},
        "novelty": 3,
        "use_x": False,
        "attention_dropout": 0.1,
    }
    with open_checkpoint(str(write_folder(tmp_path / "m", config, arrays))) as read:
        assert "quantization_config" not in read.config
        dropout, quantization, unknown = sorted(
            read.warnings, key=lambda text: ("not known" in text, "quantization" in text)
        )
        assert dropout.endswith("attention_dropout = 0.1 is not applied in training")
        assert "quantization_config is ignored" in quantization
        assert unknown.endswith("1 settings are not known and not used: novelty")


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-lfm2"])
def test_adapters_that_a_checkpoint_holds_are_known_whatever_its_type(
    tmp_path: Path, preset: str
) -> None:
    config, arrays = weights_of(preset)
    config[IN_CONFIG] = ["ab" * 32]
    with open_checkpoint(str(write_folder(tmp_path / "m", config, arrays))) as read:
        assert read.provenance["fused"] == {"adapters": config[IN_CONFIG]}


CONFIGS = {
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "llama": "LlamaConfig",
    "gemma3_text": "Gemma3TextConfig",
}


def test_each_setting_around_a_text_config_is_in_one_list() -> None:
    names = {*transformers.Gemma3Config().to_dict()}
    lists = [WRAPPER_USED, neutral_in_wrapper()]
    assert {name: sum(name in known for known in lists) for name in names} == dict.fromkeys(
        names, 1
    )
    around = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert unknown_settings("gemma3_text", {**around, "novelty": 3}, "x") == ["novelty"]
    with pytest.raises(BundleError, match="rope_scaling = "):
        unknown_settings("gemma3_text", {**around, "rope_scaling": {"factor": 8}}, "x")


@pytest.mark.parametrize(("family", "theirs"), CONFIGS.items())
def test_what_is_left_out_is_as_in_transformers(family: str, theirs: str) -> None:
    """mlx-lm's own defaults are others in places: a base of 1e6 for Qwen 2, a window of 512."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 64}
    raw = {"model_type": family, **sizes, "num_attention_heads": 32}
    expected = getattr(transformers, theirs)(**raw).to_dict()
    rope = expected["rope_parameters"]
    expected["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    expected["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta")
    config = completed_config(family, normalise_config(raw, "x", has_lm_head=False))
    compared = used_settings(family) & expected.keys() & config.keys()
    assert compared >= {"rope_theta", "rms_norm_eps", "vocab_size", "max_position_embeddings"}
    for key in compared - {"layer_types", "tie_word_embeddings"}:  # by the tensors
        if key != "sliding_window" or expected[key] is not None:  # Qwen's is off
            assert config[key] == expected[key], key


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {prefix + name: array for name, array in arrays.items()}


def test_tensors_beside_the_language_model_are_named(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    more = {"score.weight": ZEROS, "mtp.layers.0.weight": ZEROS}
    with open_checkpoint(str(write_folder(tmp_path / "m", config, {**arrays, **more}))) as read:
        (warning,) = read.warnings
        assert "read without 2 tensors outside the language model: " in warning
        assert "score.weight" in warning
    twice = {**arrays, **prefixed("language_model.", arrays)}
    is_refused(write_folder(tmp_path / "twice", config, twice), r"are both .*; it holds two models")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_model_that_was_saved_wrapped_is_read(tmp_path: Path, prefix: str) -> None:
    config, arrays = weights_of("tiny-llama")
    folder = write_folder(tmp_path / "m", config, prefixed(prefix, arrays))
    with open_checkpoint(str(folder)) as read:
        name = "model.norm.weight"
        np.testing.assert_array_equal(whole(read, name), arrays[name])
        assert read.warnings == []
    other = write_folder(tmp_path / "other", config, prefixed("transformer.", arrays))
    is_refused(other, r"none of its 21 tensors has a name as model\.layers\.0")


def test_a_model_that_was_saved_without_its_head_is_read(tmp_path: Path) -> None:
    """And what torch saves beside the weights is no weight."""
    config, arrays = weights_of("tiny-gemma3")
    inner = {name.removeprefix("model."): array for name, array in arrays.items()}
    attention = "layers.0.self_attn"
    inner |= {f"{attention}.masked_bias": ZEROS, f"{attention}.bias": np.ones((1, 1, 4, 4))}
    inner["rotary_emb.inv_freq"] = ZEROS
    with open_checkpoint(str(write_folder(tmp_path / "m", config, inner))) as read:
        for name in arrays:
            np.testing.assert_array_equal(whole(read, name), arrays[name])
        assert read.warnings == []
        assert RENAMED not in read.provenance  # adapters go onto the model with its head
    untied = {**config, "tie_word_embeddings": False}
    is_refused(
        write_folder(tmp_path / "untied", untied, inner), r"1 of .* tensors are missing: lm_head"
    )


# --- experts ----------------------------------------------------------------------------------


def _one_by_one(arrays: Arrays, count: int) -> dict[str, Any]:
    """A tensor for each expert, as transformers 4 names them and 5 saves them."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        if ".switch_mlp." not in name:
            found[name] = array
            continue
        for number, part in enumerate(np.split(array, count)):
            found[name.replace("switch_mlp", f"experts.{number}")] = part
    return found


def _stacked(arrays: Arrays, count: int) -> dict[str, Any]:
    """As mlx-lm has them."""
    return {
        name: np.stack(np.split(array, count)) if ".switch_mlp." in name else array
        for name, array in arrays.items()
    }


def _joined(arrays: Arrays, count: int) -> dict[str, Any]:
    """As transformers 5 computes with them: gate above up."""
    found = _stacked(arrays, count)
    for name in [name for name in found if name.endswith("switch_mlp.gate_proj.weight")]:
        base, inner = name.removesuffix("switch_mlp.gate_proj.weight"), "switch_mlp"
        gate, up, down = (
            found.pop(f"{base}{inner}.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        found[f"{base}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{base}experts.down_proj"] = down
    return found


ONE_MORE = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("spelled", [_one_by_one, _stacked, _joined])
def test_experts_are_read_under_all_their_names(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    spelled: Callable[..., dict[str, Any]],
    model_type: str,
) -> None:
    """Whether the class stacks them or not; the two classes with filters add 1 to norms, too."""
    settings = tiny(model_type) | {"moe_intermediate_size": 48}  # no matrix is square
    monkeypatch.setitem(PRESETS, "tiny", settings)
    config, arrays = weights_of("tiny")
    written = spelled(arrays, config["num_experts"])
    assert written.keys() != arrays.keys() or spelled is _stacked
    filters = [name for name in arrays if name.endswith("conv1d.weight")]
    if filters and spelled is not _stacked:
        written |= {name: np.moveaxis(arrays[name], 2, 1) for name in filters}
        arrays = {name: a + 1 if name.endswith(ONE_MORE) else a for name, a in arrays.items()}
    with open_checkpoint(str(write_folder(tmp_path / "m", config, written))) as read:
        assert {*read.names()} == {*arrays}
        for name, array in arrays.items():
            first, last = sorted(rng.choice(len(array) + 1, 2, replace=False).tolist())
            np.testing.assert_array_equal(read.rows(name, first, last), array[first:last])
            np.testing.assert_array_equal(whole(read, name), array)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_dense_model_under_a_type_with_experts_is_said_to_be_one(
    tmp_path: Path, model_type: str
) -> None:
    _, arrays = weights_of("tiny-llama")
    is_refused(
        write_folder(tmp_path / "m", tiny(model_type), arrays),
        "with experts, and the weights are of one without: a de",
    )


def test_experts_of_which_other_rows_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be written elsewhere under a name and in an order that transformers has not."""
    config, arrays = weights_of("tiny-qwen3-moe")
    written, name = _joined(arrays, 8), "model.layers.1.mlp.switch_mlp.{}_proj.weight"
    sanitize = qwen3_moe.Model.sanitize

    def crossed(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        """The last expert's gate is above its other half."""
        made = sanitize(self, weights)
        gate, up = (made[name.format(half)] for half in ("gate", "up"))
        made[name.format("gate")] = mx.concatenate([gate[:-1], up[-1:]])
        made[name.format("up")] = mx.concatenate([up[:-1], gate[-1:]])
        return made

    folder = str(write_folder(tmp_path / "m", config, written))
    open_checkpoint(folder).close()
    monkeypatch.setattr(qwen3_moe.Model, "sanitize", crossed)
    said = (
        f"{name.format('up')} has other rows of each matrix of model.layers.1.mlp.experts.gate_up"
    )
    is_refused(folder, re.escape(said))


FURTHER = {
    "qwen3_5_text": "mtp.fc.weight",
    "qwen3_5_moe_text": "mtp.layers.0.mlp.gate.weight",
    "qwen3_next": "mtp.layers.0.mlp.experts.0.up_proj.weight",
    "glm4_moe": "model.layers.4.eh_proj.weight",  # the layer after the last
}


@pytest.mark.parametrize(
    ("model_type", "spelled"),
    [*((model_type, _one_by_one) for model_type in FURTHER), ("qwen3_next", _stacked)],
)
def test_layers_that_predict_further_tokens_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    spelled: Callable[..., dict[str, Any]],
) -> None:
    """Whether the class leaves them out, or has nothing to do with the other tensors."""
    monkeypatch.setitem(PRESETS, "tiny", tiny(model_type))
    config, arrays = weights_of("tiny")
    name = FURTHER[model_type]
    count = config.get("num_experts") or config.get("n_routed_experts")
    written = spelled(arrays, count)
    if spelled is _one_by_one:
        filters = [name for name in arrays if name.endswith("conv1d.weight")]
        written |= {name: np.moveaxis(arrays[name], 2, 1) for name in filters}
    written[name] = np.zeros((8, 8), np.float32)
    folder = str(write_folder(tmp_path / "m", config, written))
    with open_checkpoint(folder) as read:
        told = f"read without 1 tensor outside the language model: {name}"
        assert [told] == [warning.partition(": ")[2] for warning in read.warnings]
        assert {*read.names()} == {*arrays}


@pytest.mark.parametrize("changed", [-1, 1])
def test_an_expert_of_another_shape_is_named(tmp_path: Path, changed: int) -> None:
    config, arrays = weights_of("tiny-qwen3-moe")
    written = _one_by_one(arrays, config["num_experts"])
    name = next(name for name in written if name.endswith("experts.1.up_proj.weight"))
    shape = np.add(written[name].shape, (0, changed))
    written[name] = np.zeros(shape, np.float32)
    is_refused(write_folder(tmp_path / "m", config, written), re.escape(name))


def test_experts_that_mlx_has_quantized_keep_their_integers(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen3-moe")
    written: dict[str, Any] = {}
    form = {"group_size": 32, "bits": 4}
    for name, array in _stacked(arrays, config["num_experts"]).items():
        is_matrix = array.ndim > 1
        written |= quantized(name, mx.array(array), **form) if is_matrix else {name: array}
    config["quantization"] = form
    with open_checkpoint(str(write_folder(tmp_path / "m", config, written))) as read:
        name = "model.layers.1.mlp.switch_mlp.down_proj.weight"
        kept = read.quantized_form(name)
        assert kept is not None and (kept.bits, kept.group_size) == (4, 32)
        parts = (written[name.replace("weight", part)] for part in ("weight", "scales", "biases"))
        expected = mx.dequantize(*parts, **form)
        found = whole(read, name)
        assert found.shape == arrays[name].shape
        np.testing.assert_allclose(found, np.array(expected).reshape(found.shape), atol=1e-6)


def test_a_tied_model_whose_class_cannot_tie_has_a_copy_of_the_embedding(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    raw = tiny("glm4", tie_word_embeddings=True)
    shapes = expected_shapes("glm4", normalise_config(raw, "x", True))
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    del arrays["lm_head.weight"]
    with open_checkpoint(str(write_folder(tmp_path, raw, arrays))) as read:
        embedding, head = (whole(read, f"{n}.weight") for n in ("model.embed_tokens", "lm_head"))
        np.testing.assert_array_equal(head, embedding)
        assert "it is a copy of the embedding" in " ".join(read.warnings)
        assert read.config["tie_word_embeddings"] is False


def test_a_missing_tensor_is_named_where_the_class_would_rearrange_the_others(
    tmp_path: Path,
) -> None:
    raw = tiny("qwen3_5_text")
    shapes = expected_shapes("qwen3_5", normalise_config(raw, "x", True))
    arrays = {name: np.ones(turned(shape)) for name, shape in shapes.items()}
    missing = "model.layers.2.mlp.up_proj.weight"
    del arrays[missing]
    is_refused(write_folder(tmp_path, raw, arrays), f"1 of .* tensors are missing: {missing}")
