"""GGUF files: what a converter changed is changed back, and what is wrong is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import weights_of, whole
from support.gguf_files import write_gguf

from export.sources.families import build_model
from export.sources.gguf_config import llama3_factors
from export.sources.open import open_checkpoint
from export.sources.random import PRESETS
from runtime.core.errors import BundleError

ZEROS = np.zeros((128, 128), np.float32)


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


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.factor": 0.0}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ({"scaling.type": "yarn", "scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is not"),
        ({"scaling.type": "longrope"}, "'longrope' is not supported"),
    ],
)
def test_rope_entries_have_the_defaults_of_llama_cpp(
    tmp_path: Path, entries: dict[str, float | str], expected: dict[str, Any] | str | None
) -> None:
    config, arrays = weights_of("tiny-llama")
    config = {**config, "max_position_embeddings": 512}

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in entries.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(f"llama.rope.{key}", value)

    path = write_gguf(tmp_path / "m.gguf", config, arrays, change=change)
    if isinstance(expected, str):
        with pytest.raises(BundleError, match=expected):
            open_checkpoint(str(path))
        return
    assert open_checkpoint(str(path)).config.get("rope_scaling") == expected


@pytest.mark.parametrize("pre", ["", "gpt-2"])
def test_a_tokenizer_that_does_not_say_how_it_splits_is_a_warning(tmp_path: Path, pre: str) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)

    path = write_gguf(tmp_path / "m.gguf", *weights_of("tiny-llama"), change=change)
    warnings = open_checkpoint(str(path)).warnings
    assert [("split as GPT-2 does" in text) for text in warnings] == ([] if pre else [True])


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
