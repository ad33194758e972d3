"""GGUF files: what a converter changed is changed back, and what is wrong is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
from model_types.tiny import tiny
from support.checkpoints import is_refused, weights_of, whole
from support.gguf_files import Blocks, put, random_blocks, seeing_file, write_gguf
from support.models import FAMILIES

from export.fused.gguf_metadata import Announced, add_metadata, rope_tables
from export.sources.families import (
    build_model,
    completed_config,
    expected_shapes,
    normalise_config,
)
from export.sources.gguf_blocks import transcode
from export.sources.gguf_config import llama3_factors, read_config
from export.sources.gguf_entries import as_in_file
from export.sources.gguf_keys import FIXED, NEUTRAL, USED, unknown_metadata
from export.sources.gguf_names import architecture_of, place_of, tensor_names
from export.sources.open import open_checkpoint
from export.sources.source import INSIDE
from runtime.adapters.fused import IN_GGUF
from runtime.core.errors import BundleError

NAMED = [f"tiny-{family}" for family in (*FAMILIES, "qwen3")]
ZEROS = np.zeros((128, 128), np.float32)


@pytest.mark.parametrize("preset", NAMED)
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_text_model_of_one_that_sees_is_read(tmp_path: Path, family: str) -> None:
    config, arrays = weights_of(f"tiny-{family}")
    path = seeing_file(tmp_path / "m.gguf", config, arrays)
    with open_checkpoint(str(path)) as read:
        assert (read.family, read.names(), read.warnings) == (family, list(arrays), [])
        assert read.provenance["architecture"] == f"{family}vl"
        assert read.provenance[INSIDE].startswith(family)
        found = read.config.items()
        assert {key: value for key, value in found if key in config} == config


def test_a_table_of_factors_is_llama_3s_scaling(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config["rope_theta"] = 5e5
    factors, path = llama3_factors(5e5, 32, scaling), tmp_path / "m.gguf"
    read = open_checkpoint(str(write_gguf(path, config, arrays, {"rope_freqs.weight": factors})))
    assert read.config["rope_scaling"] == scaling
    model = build_model("llama", read.config)  # mlx-lm multiplies wavelengths where we divide
    plain = 5e5 ** (np.arange(0, 32, 2) / 32)
    rope = model.model.layers[0].self_attn.rope
    np.testing.assert_allclose(np.array(rope._freqs), plain * factors, rtol=1e-4)
    other = tmp_path / "other.gguf"
    write_gguf(other, config, arrays, {"rope_freqs.weight": factors + 1})
    is_refused(other, "not one of Llama 3's")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"freq_base": None}, None),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.factor": 0.0}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ({"scaling.type": "yarn", "scaling.attn_factor": 2.0}, "attn_factor = 2.0 is not"),
        ({"scaling.attn_factor": 2.0}, "attn_factor = 2.0 is not"),
        ({"scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast = 16.0 is not"),
        ({"scaling.yarn_beta_fast": 32.0, "scaling.yarn_ext_factor": 1.0}, None),
        ({"scaling.type": "longrope"}, "'longrope' is not supported"),
    ],
)
def test_rope_entries_have_the_defaults_of_llama_cpp(
    tmp_path: Path, entries: dict[str, float | str | None], expected: dict[str, Any] | str | None
) -> None:
    config, arrays = weights_of("tiny-llama")
    config = {**config, "max_position_embeddings": 512}
    of_file = {f"arch.rope.{key}": value for key, value in entries.items()}
    path = write_gguf(tmp_path / "m.gguf", config, arrays, of_file)
    if isinstance(expected, str):
        is_refused(path, expected)
        return
    assert open_checkpoint(str(path)).config.get("rope_scaling") == expected


@pytest.mark.parametrize("pre", ["", "gpt-2"])
def test_a_tokenizer_that_does_not_say_how_it_splits_is_a_warning(tmp_path: Path, pre: str) -> None:
    entries = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    path = write_gguf(tmp_path / "m.gguf", *weights_of("tiny-llama"), entries)
    warnings = open_checkpoint(str(path)).warnings
    assert [("split as GPT-2 does" in text) for text in warnings] == ([] if pre else [True])


def test_bad_gguf_files_are_refused(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    path = tmp_path / "m.gguf"
    is_refused(
        write_gguf(path, config, arrays, architecture="mamba"),
        "'mamba' is not supported; supported are afmoe, apertus, chatglm",
    )
    for entries in (
        {"general.architecture": [1, 2]},
        {"split.count": [2, 3]},
        {"split.count": "x"},
    ):
        with pytest.raises(BundleError):
            open_checkpoint(str(write_gguf(path, config, arrays, entries)))
    for entries, said in (
        ({"split.count": 3}, "one of 3 parts; give the first one"),
        ({"blk.0.extra.weight": ZEROS}, r"does not use: blk\.0\.extra"),
        ({"rope_freqs.weight": np.ones(16, np.float32)}, "does not use: rope_freqs"),
    ):
        is_refused(write_gguf(path, config, arrays, entries), said)
    without = {name: array for name, array in arrays.items() if "norm" not in name}
    is_refused(write_gguf(path, config, without), r"missing: model\.layers\.0")
    content = write_gguf(path, config, arrays).read_bytes()
    for size, message in ((10, "not even"), (200, "header asks for"), (-1000, "truncated")):
        path.write_bytes(content[:size])
        is_refused(path, message)
    norm = b"output_norm.weight"  # its name, dimensions, their sizes, type, and offset
    start = content.index(norm) + len(norm) + 4 + 8 + 4
    path.write_bytes(content[:start] + bytes(8) + content[start + 8 :])
    is_refused(path, r"starts at byte \d+, inside .*, which ends at \d+")
    start = content.index(architecture := b"general.architecture") + len(architecture)
    path.write_bytes(content[:start] + bytes([99]) + content[start + 1 :])
    is_refused(path, r"general\.architecture has the unknown type 99")
    path.write_bytes(b"GGUX" + content[4:])
    is_refused(path, "not a little-endian GGUF")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("output.weight", np.zeros((2, 160, 128), np.float32), "1 tensor of the wrong shape"),
        ("output.weight", np.zeros((320, 128), np.int32), "type I32 cannot be read, as output.we"),
        ("rope_freqs.weight", np.ones(16, np.int32), "type I32 cannot be read, as rope_freqs.we"),
        ("rope_freqs.weight", np.full(16, np.nan, np.float32), "not one of Llama 3's scalings"),
    ],
)
def test_a_tensor_of_another_shape_or_type_is_named(
    tmp_path: Path, name: str, value: np.ndarray, message: str
) -> None:
    config, arrays = weights_of("tiny-llama")
    arrays.pop("lm_head.weight")
    path = write_gguf(tmp_path / "m.gguf", config, arrays, {name: value})
    is_refused(path, message)


def test_parts_of_a_file_are_read_together(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    half = list(arrays)[: len(arrays) // 2]
    parts = ({n: arrays[n] for n in half}, {n: a for n, a in arrays.items() if n not in half})
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(arrays)}
        write_gguf(path, config, part, split, stored_as=gguf.GGMLQuantizationType.F32)
    with open_checkpoint(str(paths[0])) as read:
        assert [file["name"] for file in read.provenance["files"]] == [path.name for path in paths]
        for name, array in arrays.items():
            np.testing.assert_array_equal(whole(read, name), array)
    is_refused(paths[1], "one of 2 parts; give the first one")
    paths[1].write_bytes(paths[0].read_bytes())
    is_refused(paths[0], "is not part 2 of m-00001")
    paths[1].unlink()
    is_refused(paths[0], "missing, part 2 of 2")


def file_of(
    path: Path,
    family: str,
    arrays: dict[str, np.ndarray | Blocks],
    entries: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, tuple[int, ...]]:
    """A file of a family with these tensors, and zeros for the others; the shapes of all."""
    config = completed_config(family, normalise_config(tiny(family, **changes), family, True))
    shapes, count = expected_shapes(family, config), config["num_hidden_layers"]
    writer, name_of = gguf.GGUFWriter(path, architecture_of(family)), tensor_names(family, count)
    add_metadata(writer, family, config, config["vocab_size"])
    put(writer, entries)
    for name, table in rope_tables(config).items():
        writer.add_tensor(name, table)
    for name, shape in shapes.items():
        if (stored := name_of(name)) is None or stored in writer.tensors[0]:
            continue
        whole = place_of(family, config, name, shape).shape
        array = arrays.get(name, arrays.get(stored, np.zeros(whole, np.float32)))
        rows = array.rows if isinstance(array, Blocks) else array
        if ".switch_mlp." in name:
            rows = rows.reshape(4, -1, rows.shape[1])
        writer.add_tensor(stored, rows, raw_dtype=array.type if isinstance(array, Blocks) else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return shapes


def in_order(array: np.ndarray, heads: list[int], axis: int = 0) -> np.ndarray:
    """Parts of an axis, as many as heads, in another order."""
    return np.concatenate([np.split(array, len(heads), axis)[head] for head in heads], axis)


def test_quantized_parts_of_tensors_are_read_each_by_its_layer_and_head(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    """Columns of a table of all layers, and heads in another order along rows and columns."""
    table = random_blocks(rng, "Q4_K", 320, 4 * 256)
    path, sizes = tmp_path / "m.gguf", {"hidden_size_per_layer_input": 256}
    stored: dict[str, np.ndarray | Blocks] = {"per_layer_token_embd.weight": table}
    file_of(path, "gemma4_text", stored, **sizes)
    every = transcode(table.rows, table.type)
    with open_checkpoint(str(path)) as read:
        name, part = "model.layers.2.embed_tokens_per_layer.weight", np.s_[10:40, 512:768]
        np.testing.assert_array_equal(read.rows(name, 10, 40), table.values[part])
        form = read.quantized_form(name)
        assert form is not None
        found = read.quantized_rows(name, 10, 40).values(form)
        np.testing.assert_array_equal(found, every.values(form)[part])
    stored["per_layer_token_embd.weight"] = random_blocks(rng, "Q4_K", 320, 256)
    file_of(path, "gemma4_text", stored, hidden_size_per_layer_input=64)
    with (
        open_checkpoint(str(path)) as read,
        pytest.raises(BundleError, match="columns 128 to 192 of a layer do not begin and end"),
    ):
        read.rows(name, 10, 40)
    rows, columns = random_blocks(rng, "Q8_0", 512, 64), random_blocks(rng, "Q4_K", 64, 256)
    stored = {"blk.0.attn_qkv.weight": rows, "blk.0.ssm_out.weight": columns}
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64)
    file_of(path, "qwen3_5", stored, **sizes, rms_norm_eps=1e-6)
    with open_checkpoint(str(path)) as read:
        for module, blocks, heads, axis in (
            ("in_proj_qkv", rows, [0, 1, 2, 3, 4, 6, 5, 7], 0),  # 2 of queries, 2 of keys
            ("out_proj", columns, [0, 2, 1, 3], 1),
        ):
            name = f"model.layers.0.linear_attn.{module}.weight"
            expected = in_order(blocks.values, heads, axis)[5:60]
            np.testing.assert_array_equal(read.rows(name, 5, 60), expected)
            form = read.quantized_form(name)
            assert form is not None
            expected = in_order(transcode(blocks.rows, blocks.type).values(form), heads, axis)
            found = read.quantized_rows(name, 5, 60).values(form)
            np.testing.assert_array_equal(found, expected[5:60])


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    entries = {
        "arch.block_count": 5,
        "arch.nextn_predict_layers": 1,
        "blk.4.attn_norm.weight": np.zeros(64, np.float32),
        "blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32),
    }
    file_of(path, "qwen3_5", {}, entries, rms_norm_eps=1e-6, linear_key_head_dim=16)
    with open_checkpoint(str(path)) as read:
        assert read.config["num_hidden_layers"] == 4
        assert not [name for name in read.names() if ".4." in name]
        assert "last 1 blocks predict the tokens after the next one" in "".join(read.warnings)


def test_the_number_of_blocks_that_are_left_out_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    entries = {"arch.block_count": 2**31 + 4, "arch.nextn_predict_layers": 2**31}
    file_of(path, "qwen3_5", {}, entries, rms_norm_eps=1e-6, linear_key_head_dim=16)
    with open_checkpoint(str(path)) as read:
        assert read.config["num_hidden_layers"] == 4


def test_a_damaged_number_of_heads_of_linear_attention_is_refused(tmp_path: Path) -> None:
    path, sizes = tmp_path / "m.gguf", {"rms_norm_eps": 1e-6, "linear_key_head_dim": 16}
    file_of(path, "qwen3_5", {}, {"arch.ssm.group_count": 0}, **sizes)
    is_refused(path, r"qwen35\.ssm\.group_count = 0 is not supported")


@pytest.mark.parametrize("beta", [0.5, [0.5] * 4, [0.5] * 3, ["a"] * 4, None])
def test_numbers_of_an_activation_are_metadata(tmp_path: Path, beta: Any) -> None:
    """One for each layer, or one for all, as llama.cpp reads them."""
    path = tmp_path / "m.gguf"
    entries: dict[str, Any] = {
        f"xielu.{name}": [number + layer / 4 for layer in range(4)]
        for number, name in enumerate(("alpha_p", "alpha_n", "eps"))
    }
    file_of(path, "apertus", {}, {**entries, "xielu.beta": beta})
    if beta not in (0.5, [0.5] * 4):
        is_refused(path, r"xielu\.beta must be a number for each layer")
        return
    with open_checkpoint(str(path)) as read:
        found = [
            [
                float(read.rows(f"model.layers.{layer}.mlp.act_fn.{name}", 0, 1)[0])
                for layer in range(4)
            ]
            for name in ("alpha_n", "beta")
        ]
    assert found == [[1.0, 1.25, 1.5, 1.75], [0.5] * 4]


@pytest.mark.parametrize("groups", [1, 2])
def test_experts_in_one_group_are_read(tmp_path: Path, groups: int) -> None:
    """As in published files of GLM 4.5 and dots1, of which llama.cpp then leaves the groups out."""
    path = tmp_path / "m.gguf"
    entries = {"arch.expert_group_count": groups, "arch.expert_group_used_count": 1}
    file_of(path, "glm4_moe", {}, entries)
    if groups > 1:
        is_refused(path, r"glm4moe\.expert_group_count = 2 is not supported")
        return
    with open_checkpoint(str(path)) as read:
        assert read.config["n_group"] == 1


def test_quantized_experts_are_read_each_in_its_rows(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    types = {"gate": "Q4_K", "up": "Q6_K", "down": "Q8_0"}
    of_layer = "model.layers.{}.block_sparse_moe.switch_mlp.{}_proj.weight"
    kinds = {of_layer.format(0, part): kind for part, kind in types.items()}
    kinds |= {of_layer.format(1, "up"): "MXFP4"}
    sizes = {"gate": (2048, 256), "up": (2048, 256), "down": (1024, 512)}
    blocks: dict[str, np.ndarray | Blocks] = {}
    for name, kind in kinds.items():
        part = name.split(".")[-2].removesuffix("_proj")
        blocks[name] = random_blocks(rng, kind, *sizes[part])
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    file_of(tmp_path / "m.gguf", "mixtral", blocks, **changes)
    rows = slice(200, 600)  # of two experts
    with open_checkpoint(str(tmp_path / "m.gguf")) as read:
        assert read.family == "mixtral"
        for name, expected in blocks.items():
            assert isinstance(expected, Blocks)
            np.testing.assert_array_equal(read.rows(name, 200, 600), expected.values[rows])
            form = read.quantized_form(name)
            assert (form is None) == (expected.type.name == "MXFP4")
            if form is not None:
                stored = transcode(expected.rows[rows], expected.type).values(form)
                found = read.quantized_rows(name, 200, 600).values(form)
                np.testing.assert_array_equal(found, stored)


def test_a_gate_of_one_row_may_be_stored_as_a_vector(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    gate = rng.normal(0, 1, 64).astype(np.float32)
    shapes = file_of(tmp_path / "m.gguf", "qwen2_moe", {name: gate}, num_hidden_layers=1)
    assert shapes[name] == (1, 64)
    with open_checkpoint(str(tmp_path / "m.gguf")) as read:
        np.testing.assert_array_equal(read.rows(name, 0, 1), gate[None])


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


# --- metadata ---------------------------------------------------------------------------------

LISTS = (USED, NEUTRAL, frozenset(FIXED) - {"ARCH.*"})


def of_preset(path: Path, preset: str, entries: dict[str, Any]) -> Path:
    return write_gguf(path, *weights_of(preset), entries)


def known_keys(keys: type) -> Iterator[str]:
    for value in vars(keys).values():
        if isinstance(value, type):
            yield from known_keys(value)
        elif isinstance(value, str) and value != keys.__module__:
            yield re.sub(r"\{\w+\}", "x", value.replace("{arch}", "ARCH"))


def test_each_key_of_gguf_is_in_one_list() -> None:
    """Those of an architecture that are in none must be 0."""
    patterns = [re.escape(name).replace(r"\*", ".+") for names in LISTS for name in names]
    found = {
        key: sum(bool(re.fullmatch(pattern, key)) for pattern in patterns)
        for key in known_keys(gguf.Keys)
    }
    assert len(found) > 150
    assert {key: 1 for key in found if not key.startswith("ARCH.")}.items() <= found.items()
    assert max(found.values()) == 1


@pytest.mark.parametrize(
    ("preset", "entries", "message"),
    [
        ("tiny-llama", {"arch.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        ("tiny-llama", {"arch.attention.scale": 0.5}, "attention.scale = 0.5"),
        ("tiny-llama", {"arch.expert_count": 8}, "expert_used_count is missing"),
        ("tiny-qwen2", {"arch.expert_count": 8}, "expert_count = 8"),
        ("tiny-llama", {"arch.attention.causal": False}, "attention.causal = False"),
        ("tiny-llama", {"arch.attention.sliding_window": 16}, "sliding_window = 16"),
        ("tiny-llama", {"arch.rope.dimension_sections": [8, 8, 0, 0]}, "dimension_sections"),
        ("tiny-qwen2", {"arch.attention.sliding_window": 16}, "sliding_window = 16"),
        ("tiny-qwen2", {"arch.rope.dimension_count": 16}, "rope.dimension_count = 16"),
        ("tiny-gemma3", {"arch.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("tiny-gemma3", {"arch.attention.key_length_swa": 16}, "key_length_swa = 16"),
        ("tiny-gemma3", {"arch.block_count": 2**31}, "block_count = 2147483648 is not supported"),
        ("tiny-llama", {"arch.block_count": 0}, "block_count = 0 is not supported"),
        (
            "tiny-llama",
            {"arch.rope.scaling.type": "yarn", "arch.rope.scaling.factor": 0.5},
            r"rope\.scaling\.factor = 0\.5 is not supported; it must be at least 1",
        ),
        ("tiny-llama", {"arch.attention.key_length": 0}, "attention.key_length = 0 is not supp"),
        ("tiny-llama", {"arch.embedding_length": 129}, r"hidden_size is llama\.embedding_length"),
        ("tiny-gemma3", {"arch.dense_2_feat_in": 64}, "dense_2_feat_in = 64"),
        ("tiny-qwen3", {"tokenizer.ggml.remove_extra_whitespaces": True}, "extra_whitespaces"),
        ("tiny-qwen3", {"arch.novelty": 1.0}, "--remove-metadata qwen3.novelty"),
        ("tiny-qwen3", {"arch.rope.freq_base_swa": 5.0}, "freq_base_swa = 5.0"),
        ("tiny-qwen3", {"general.type": "mmproj"}, "general.type = 'mmproj'"),
    ],
)
def test_an_entry_that_is_not_computed_is_refused(
    tmp_path: Path, preset: str, entries: dict[str, Any], message: str
) -> None:
    is_refused(of_preset(tmp_path / "m.gguf", preset, entries), message)


def test_entries_are_named_of_whole_words_alone() -> None:
    problem = BundleError("/head_dim/m.gguf: moe_intermediate_size must be 64 as hidden size, is 0")
    said = str(as_in_file(problem, "qwen3_moe", "qwen3moe")).partition(" (in the file ")[2]
    assert sorted(said.removesuffix(")").split(", ")) == [
        "hidden_size is qwen3moe.embedding_length",
        "moe_intermediate_size is qwen3moe.expert_feed_forward_length",
    ]


def test_an_entry_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    """Each entry that is used, whatever it says."""
    apart = {"general.alignment", "split.count", IN_GGUF}  # which are read before, or checked apart
    values = ["", "x", ["x"], np.array([1.5]), 0.5, -1, np.inf, np.nan, 2.0**40, True]
    for name in sorted(key for key in USED - apart if "*" not in key):
        key, accepted = name.replace("ARCH.", "qwen2."), []
        for value in values:
            try:
                metadata = {"general.architecture": "qwen2", key: value}
                unknown_metadata(metadata, "qwen2", "x")
                accepted.append(value)
            except BundleError as problem:
                assert f"x: metadata {key} must be " in str(problem)
        assert len(accepted) < len(values) / 2, key
        for value in accepted:
            written = value.tolist() if isinstance(value, np.ndarray) else value
            entry = {name.replace("ARCH.", "arch."): written}
            try:
                with open_checkpoint(str(of_preset(tmp_path / "m.gguf", "tiny-qwen2", entry))) as m:
                    m.tokenizer_files()
            except BundleError as problem:
                assert key in str(problem), f"{key}: {problem}"


def test_entries_without_effect_and_unknown_ones(tmp_path: Path) -> None:
    entries = {
        "arch.logit_scale": 1.0,
        "arch.attention.sliding_window": 1024,
        "arch.pooling_type": 3,
        "general.sampling.top_k": 20,
        "quantize.imatrix.file": "x",
    }
    with open_checkpoint(str(of_preset(tmp_path / "a.gguf", "tiny-qwen3", entries))) as read:
        assert read.warnings == []
    new = {"arch.novelty": 0, "general.whim": "x"}
    with open_checkpoint(str(of_preset(tmp_path / "b.gguf", "tiny-qwen3", new))) as read:
        (warning,) = read.warnings
        assert warning.endswith(
            "1 entries of its metadata are not known and not used: general.whim"
        )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"sliding_window": 0}, 1),
        ({"sliding_window": 5, "sliding_window_pattern": [True, False, True]}, 2),
    ],
)
def test_gemmas_windows_are_those_of_llama_cpp(
    tmp_path: Path, entries: dict[str, Any], expected: int
) -> None:
    entries = {f"arch.attention.{key}": value for key, value in entries.items()}
    with open_checkpoint(str(of_preset(tmp_path / "m.gguf", "tiny-gemma3", entries))) as read:
        assert read.config["sliding_window_pattern"] == expected


@pytest.mark.parametrize(
    ("family", "missing", "setting", "value"),
    [
        ("granite", "embedding_scale", "embedding_multiplier", 1.0),
        ("granite", "attention.scale", "attention_multiplier", 0.25),
        ("gemma2", "attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        ("qwen2_moe", "expert_feed_forward_length", "moe_intermediate_size", 48),
        ("qwen2_moe", "expert_shared_feed_forward_length", "shared_expert_intermediate_size", 96),
    ],
)
def test_entries_that_are_missing_have_the_defaults_of_llama_cpp(
    family: str, missing: str, setting: str, value: float
) -> None:
    raw = tiny(family, head_dim=16)
    config = completed_config(family, normalise_config(raw, family, True))
    for gone in (None, 0):
        writer = gguf.GGUFWriter(None, architecture_of(family))
        add_metadata(writer, family, config, config["vocab_size"])
        entries = {key: entry.value for key, entry in writer.kv_data[0].items()}
        key = f"{writer.arch}.{missing}"
        assert entries.pop(key) == config[setting]
        if gone is not None:
            entries[key] = gone
        file = Announced(entries, {"token_embd.weight": ZEROS}, {})
        assert read_config(file, family)[setting] == value
