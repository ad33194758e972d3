"""GGUF files for tests, written by the gguf library, and random blocks of each quantized type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from export.sources.gguf_names import ARCHITECTURES
from export.sources.gguf_tokenizer import NO_VOCABULARY
from support.checkpoints import Arrays

# where a block's float16 numbers stand, in bytes
_FLOATS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
_EXPONENTS = 110, 125  # of MXFP4, in the first byte
QUANTIZED = tuple(_FLOATS)


@dataclass(frozen=True)
class Blocks:
    """A matrix of random blocks: rows (R, bytes of a row) as a file has them."""

    type: GGMLQuantizationType
    rows: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What the gguf library reads from them, (R, C)."""
        return np.asarray(gguf.quants.dequantize(self.rows, self.type), np.float32)


def random_blocks(rng: np.random.Generator, name: str, rows: int, columns: int) -> Blocks:
    """Any bits everywhere, but for finite float16 numbers."""
    type_ = GGMLQuantizationType[name]
    values, octets = GGML_QUANT_SIZES[type_]
    found = rng.integers(0, 256, (rows * columns // values, octets), np.uint8)
    if name == "MXFP4":
        found[:, 0] = rng.integers(*_EXPONENTS, len(found))
    for at in _FLOATS.get(name, ()):
        numbers = rng.normal(0, 0.02, (len(found), 1)).astype(np.float16)
        found[:, at : at + 2] = numbers.view(np.uint8)
    return Blocks(type_, found.reshape(rows, -1))


def to_llama_cpp(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """llama.cpp's converter, by its own tables: the name, the +1 of Gemma, llama's row order."""
    family = config["model_type"]
    arch_number = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[
        ARCHITECTURES[family]
    ]
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


def put(writer: gguf.GGUFWriter, entries: Mapping[str, Any]) -> None:
    """Adds or replaces entries; "arch." stands for the architecture.

    None takes an entry out, and what is named as a weight is a tensor.
    """
    for name, value in entries.items():
        if name.endswith(".weight"):
            writer.add_tensor(name, value)
            continue
        key = name.replace("arch.", f"{writer.arch}.")
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            kinds = {gguf.GGUFValueType.INT32: gguf.GGUFValueType.UINT32}  # llama.cpp's counts
            writer.add_key_value(key, value, kinds.get(kind, kind))


def write_gguf(
    path: Path,
    config: dict[str, Any],
    arrays: Arrays,
    entries: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Path:
    """A file of `arrays`, named as in mlx-lm: matrices as float16, or quantized as `stored_as`.

    `blocks` are quantized matrices that replace those of the same name. `entries` are put into the
    file, too, and `architecture` is written instead of the family's.
    """
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, more.get("architecture", ARCHITECTURES[family]))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32(
            "gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"]
        )
    put(writer, entries)
    for name, array in arrays.items():
        mapped, changed = to_llama_cpp(name, array, config)
        stored_as = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else more.get("stored_as")
        if (blocks := more.get("blocks", {}).get(name)) is not None:
            packed = to_llama_cpp(name, blocks.rows, config)[1]
            writer.add_tensor(mapped, packed, raw_dtype=blocks.type)
        elif stored_as is None:
            writer.add_tensor(mapped, changed.astype(np.float16))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(changed), stored_as)
            writer.add_tensor(mapped, packed, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seeing_file(path: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    """A float32 file of a Qwen that sees, which holds the text model, without a tokenizer."""
    family = config["model_type"]
    half = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    entries = {
        "tokenizer.ggml.model": NO_VOCABULARY,
        "arch.vocab_size": config["vocab_size"],
        "arch.rope.dimension_sections": [half - 2 * (half // 3), half // 3, half // 3, 0],
        "arch.n_deepstack_layers": 1 if family == "qwen3" else None,
    }
    seeing: dict[str, Any] = {"architecture": f"{family}vl", "stored_as": GGMLQuantizationType.F32}
    return write_gguf(path, config, arrays, entries, **seeing)
