"""The names of a model's tensors in llama.cpp, and the order of their rows there.

`export.sources.gguf` undoes this to read a file; the writers of GGUF files do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from runtime.core.errors import UsageError

# family -> GGUF architecture; of several families a file is of the first without a mark
ARCHITECTURES = {
    **{"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe"},
    **{"qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2"},
    **{"gemma3_text": "gemma3", "granite": "granite", "granitemoehybrid": "granite"},
    **{"granitemoe": "granitemoe", "gpt_oss": "gpt-oss", "smollm3": "smollm3", "olmo2": "olmo2"},
    **{"olmoe": "olmoe", "cohere": "command-r", "glm4": "glm4", "ernie4_5": "ernie4_5"},
    **{"starcoder2": "starcoder2", "phi3": "phi3", "seed_oss": "seed_oss", "exaone": "exaone"},
    **{"hunyuan_v1_dense": "hunyuan-dense", "nemotron": "nemotron", "stablelm": "stablelm"},
    **{"gpt2": "gpt2", "lfm2": "lfm2", "cohere2": "cohere2", "olmo3": "olmo2", "phi": "phi2"},
    **{"gpt_bigcode": "starcoder", "glm": "chatglm", "exaone4": "exaone4"},
    "ministral3": "mistral3",
}
# entries of a family's files that other ones of the architecture do not have
_MARKS = {"mixtral": "expert_count", "olmo3": "attention.sliding_window"}
# families whose heads llama.cpp turns by neighbours, and transformers by halves
_TURNED = ("llama", "mixtral", "granite", "granitemoehybrid", "granitemoe", "smollm3", "ministral3")
# parts of mlx-lm's names, and those that the library knows
_RENAMED = (
    *((".block_sparse_moe.switch_mlp.", ".mlp.experts."), (".switch_mlp.", ".experts.")),
    *((f".block_sparse_moe.router.{end}", ".block_sparse_moe.gate.") for end in ("layer.", "")),
    ("model.h.", "transformer.h."),
)
_SUFFIXES = (".weight", ".bias")
# layers whose rows llama's converter reorders -> the setting that says how many heads they have
_REORDERED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def architecture_of(family: str) -> str:
    """The GGUF architecture of a family. Raises UsageError where it is not known."""
    if family not in ARCHITECTURES:
        raise UsageError(
            f"--to gguf: how llama.cpp names the tensors of {family} is not known; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[family]


def family_of(metadata: Mapping[str, Any]) -> str | None:
    """The family of a file's model; None where its architecture is not known."""
    arch = metadata.get("general.architecture")
    families = [family for family, known in ARCHITECTURES.items() if str(arch) == known]
    marks = {family: metadata.get(f"{arch}.{key}") for family, key in _MARKS.items()}
    marked = (f for f in families if isinstance(marks.get(f), int) and marks[f])
    return next(marked, next((f for f in families if f not in _MARKS), None))


def tensor_names(family: str, layers: int) -> Callable[[str], str | None]:
    """A function from mlx-lm's name of a tensor to the one in GGUF files.

    It gives None for a tensor that the architecture does not have.
    """
    arch = architecture_of(family)
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, layers)

    def name_of(name: str) -> str | None:
        for old, new in _RENAMED:
            name = name.replace(old, new)
        for inner in (name, name.removeprefix("model.")):
            if (stored := names.get_name(inner, try_suffixes=_SUFFIXES)) is not None:
                return str(stored) if stored.endswith(_SUFFIXES) else f"{stored}{_SUFFIXES[0]}"
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
