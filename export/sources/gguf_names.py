"""The names of a model's tensors in llama.cpp, and the order of their rows there.

`export.sources.gguf` undoes this to read a file; the writers of GGUF files do it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from runtime.core.errors import UsageError

# GGUF architecture -> family
ARCHITECTURES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"},
    **{"granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2", "command-r": "cohere"},
    **{"glm4": "glm4", "ernie4_5": "ernie4_5", "starcoder2": "starcoder2"},
    **{"qwen3moe": "qwen3_moe", "phi3": "phi3", "seed_oss": "seed_oss", "gemma": "gemma"},
    **{"hunyuan-dense": "hunyuan_v1_dense", "exaone": "exaone", "nemotron": "nemotron"},
    **{"stablelm": "stablelm", "gpt2": "gpt2", "lfm2": "lfm2"},
}
_AS = {"granitemoehybrid": "granite"}  # families that without their mixers are another one
# families whose heads llama.cpp turns by neighbours, and transformers by halves
_TURNED = ("llama", "granite", "granitemoehybrid", "smollm3")
_EXPERTS = (".switch_mlp.", ".experts.")  # mlx-lm's name, and the one that the library knows
# layers whose rows llama's converter reorders -> the setting that says how many heads they have
_REORDERED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def architecture_of(family: str) -> str:
    """The GGUF architecture of a family. Raises UsageError where it is not known."""
    known = _AS.get(family, family)
    arch = next((arch for arch, name in ARCHITECTURES.items() if name == known), None)
    if arch is None:
        raise UsageError(
            f"--to gguf: how llama.cpp names the tensors of {family} is not known; known are "
            f"{', '.join(ARCHITECTURES.values())}"
        )
    return arch


def tensor_names(arch: str, layers: int) -> Callable[[str], str | None]:
    """A function from mlx-lm's name of a tensor, with .weight or .bias, to the one in GGUF files.

    It gives None for a tensor that the architecture does not have.
    """
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, layers)

    def name_of(name: str) -> str | None:
        known = name.replace(*_EXPERTS)
        for inner in (
            known,
            known.replace("model.h.", "transformer.h."),
            known.removeprefix("model."),
        ):
            if (stored := names.get_name(inner, try_suffixes=(".weight", ".bias"))) is not None:
                return str(stored)
        return None

    return name_of


def stored_rows(
    family: str, config: dict[str, Any], name: str, rows: int
) -> npt.NDArray[np.intp] | None:
    """The index in a file of each row of a tensor, (rows,); None where the order is the same.

    Row i of the model is row `stored_rows(...)[i]` of the file. llama.cpp rotates pairs of
    neighbours, so its converter stores rows (half, j) of each head of Llama and others
    as (j, half).
    """
    parts = name.split(".")
    heads = _REORDERED.get(parts[-2]) if family in _TURNED and len(parts) > 1 else None
    if heads is None:
        return None
    return np.arange(rows).reshape(config[heads], -1, 2).swapaxes(1, 2).reshape(-1)


def model_rows(
    family: str, config: dict[str, Any], name: str, rows: int
) -> npt.NDArray[np.intp] | None:
    """The index in the model of each row of a file, (rows,); None where the order is the same.

    The inverse of `stored_rows`: `array[model_rows(...)]` are the rows of the file.
    """
    order = stored_rows(family, config, name, rows)
    return None if order is None else np.argsort(order)
