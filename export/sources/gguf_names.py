"""The names of a model's tensors in llama.cpp, and where and how a file's tensor has their values.

`export.sources.gguf` undoes this to read a file; the writers of GGUF files do it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from export.sources.families import NORM_NEUTRAL
from export.sources.source import INSIDE
from export.stored import F32
from runtime.core.errors import UsageError

Index = npt.NDArray[np.intp]

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
    **{"ministral3": "mistral3", "gemma4_text": "gemma4", "qwen3_5": "qwen35"},
    **{"glm4_moe": "glm4moe", "solar_open": "glm4moe", "dots1": "dots1", "afmoe": "afmoe"},
    **{"minimax": "minimax-m2", "gpt_neox": "gptneox", "internlm3": "llama"},
    **{"apertus": "apertus", "minicpm3": "minicpm3"},
}
# architectures of models that see besides -> the family of the text model, and transformers' types
# of it, of which a file is of the first
SEEING = {
    "qwen2vl": ("qwen2", ("qwen2_vl_text", "qwen2_5_vl_text")),
    "qwen3vl": ("qwen3", ("qwen3_vl_text",)),
}
# transformers' type of models of a family, where it is not the family's name
TYPES = {"minimax": "minimax_m2"}
# entries of a family's files that other ones of the architecture do not have
_MARKS = {"mixtral": "expert_count", "olmo3": "attention.sliding_window"}
# families whose heads llama.cpp turns by neighbours, and transformers by halves
_TURNED = (
    *("llama", "mixtral", "granite", "granitemoehybrid", "granitemoe", "smollm3", "ministral3"),
    "internlm3",
)
# parts of mlx-lm's names, and those that the library knows
_RENAMED = (
    *((".block_sparse_moe.switch_mlp.", ".mlp.experts."), (".switch_mlp.", ".experts.")),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."),
    ("model.h.", "transformer.h."),
)
_PREFIXES = {"gpt_neox": (("model.h.", "gpt_neox.layers."), ("model.", "gpt_neox."))}
_SUFFIXES = (".weight", ".bias")
_ROUTER_BIAS = "blk.{}.exp_probs_b.bias"
# names in a layer that the library does not know -> the file's
_IN_LAYERS = {
    **{
        family: {"mlp.gate.e_score_correction_bias": _ROUTER_BIAS}
        for family in ("glm4_moe", "solar_open", "dots1")
    },
    "minimax": {"block_sparse_moe.e_score_correction_bias": _ROUTER_BIAS},
    "afmoe": {"mlp.expert_bias": _ROUTER_BIAS},
    "qwen3_5": {"linear_attn.dt_bias": "blk.{}.ssm_dt.bias", "linear_attn.A_log": "blk.{}.ssm_a"},
    "gemma4_text": {
        "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        "router.scale": "blk.{}.ffn_gate_inp.scale",
        "router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
        **{
            f"experts.switch_glu.{half}_proj.weight": "blk.{}.ffn_gate_up_exps.weight"
            for half in ("gate", "up")
        },
        "experts.switch_glu.down_proj.weight": "blk.{}.ffn_down_exps.weight",
    },
}
# matrices that llama.cpp multiplies by without their adapters
WITHOUT_ADAPTER = {"minicpm3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
# parameters in a layer that files have as metadata, a number for each layer -> the keys
AS_METADATA = {
    "apertus": {
        f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")
    }
}
_LAYER = re.compile(r"model\.(?:layers|h)\.(\d+)\.(.+)")
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


def architecture_beside(family: str, provenance: Mapping[str, Any]) -> str:
    """The architecture of files of a source's model, which may see besides."""
    inside = provenance.get(INSIDE)
    seeing = (arch for arch, (own, types) in SEEING.items() if own == family and inside in types)
    return next(seeing, architecture_of(family))


def family_of(metadata: Mapping[str, Any]) -> str | None:
    """The family of a file's model; None where its architecture is not known."""
    arch = str(metadata.get("general.architecture"))  # of any type in a damaged file
    if arch in SEEING:
        return SEEING[arch][0]
    families = [family for family, known in ARCHITECTURES.items() if arch == known]
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
        if (inside := _LAYER.fullmatch(name)) and inside[2] in _IN_LAYERS.get(family, {}):
            return _IN_LAYERS[family][inside[2]].format(inside[1])
        outer = name.removeprefix("model.")
        for old, new in (*_PREFIXES.get(family, ()), *_RENAMED):
            name = name.replace(old, new)
        for inner in (name, name.removeprefix("model."), outer):
            if (stored := names.get_name(inner, try_suffixes=_SUFFIXES)) is not None:
                return str(stored) if stored.endswith(_SUFFIXES) else f"{stored}{_SUFFIXES[0]}"
        return None

    return name_of


def listed_in(family: str, name: str) -> tuple[str, int] | None:
    """The entry that has the number of a parameter for each layer, and the parameter's layer.

    It is None for a tensor that files have as a tensor.
    """
    inside = _LAYER.fullmatch(name)
    key = AS_METADATA.get(family, {}).get(inside[2]) if inside else None
    return (key, int(inside[1])) if inside and key else None


@dataclass(frozen=True)
class Place:
    """Where a tensor of a file has the values of a model's tensor.

    Row i of the model's is row `rows[i]` of the file's, and so with the columns; without an index
    they are the same. `shape` is that of the file's tensor.
    """

    shape: tuple[int, ...]
    rows: Index | None = None
    columns: Index | slice | None = None

    def row_index(self, start: int, stop: int) -> Index | slice:
        """The rows of the file for rows start:stop of the model."""
        return slice(start, stop) if self.rows is None else self.rows[start:stop]


def place_of(family: str, config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Place:
    """Where a file has the tensor `name` of the model, which has this shape.

    llama.cpp rotates pairs of neighbours, so its converter stores rows (half, j) of each head of
    Llama and others as (j, half). It has all queries of GPT-NeoX before all keys.
    """
    inside = _LAYER.fullmatch(name)
    module, _, _ = (inside[2] if inside else name).rpartition(".")
    last = module.rpartition(".")[2]
    if family == "qwen3_5" and inside:
        return _of_delta_rule(config, inside[2], shape)
    if family == "gemma4_text" and inside:
        return _of_gemma4(config, int(inside[1]), module, shape)
    if last == "query_key_value" and family == "gpt_neox":
        heads = np.arange(shape[0]).reshape(3, config["num_attention_heads"], -1)
        return Place(shape, heads.swapaxes(0, 1).reshape(-1))
    if family not in _TURNED or last not in _REORDERED:
        return Place(shape)
    rows = np.arange(shape[0]).reshape(config[_REORDERED[last]], -1, 2)
    return Place(shape, rows.swapaxes(1, 2).reshape(-1))


def _of_gemma4(config: Mapping[str, Any], layer: int, module: str, shape: tuple[int, ...]) -> Place:
    """A layer's part of what all have in one tensor; the two halves of an expert lie together."""
    count, part = config["num_hidden_layers"], slice(layer * shape[-1], (layer + 1) * shape[-1])
    if module == "embed_tokens_per_layer":
        return Place((shape[0], count * shape[1]), columns=part)
    if module == "per_layer_model_projection":
        rows = np.arange(shape[0])
        return Place((count * shape[0], shape[1]), rows + layer * shape[0])
    if module.startswith("experts.") and not module.endswith("down_proj"):
        pairs = np.arange(2 * shape[0]).reshape(config["num_experts"], 2, -1)
        half = int(module.endswith("up_proj"))
        return Place((2 * shape[0], shape[1]), pairs[:, half].reshape(-1))
    return Place(shape)


def _of_delta_rule(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Place:
    """Heads of values lie by their number within a head of keys, and not by the head of keys."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = np.arange(values).reshape(-1, keys).T.reshape(-1, 1)
    own = name.removeprefix("linear_attn.").removesuffix(".weight")
    width = 1 if own in ("in_proj_b", "in_proj_a", "dt_bias", "A_log") else 0
    if own in ("in_proj_qkv", "conv1d", "in_proj_z", "out_proj"):
        width = config["linear_value_head_dim"]
    if not width or keys == values or not name.startswith("linear_attn."):
        return Place(shape)
    order = (heads * width + np.arange(width)).reshape(-1)
    if own == "out_proj":
        return Place(shape, columns=order)
    others = shape[0] - len(order)  # of queries and keys
    return Place(shape, np.concatenate([np.arange(others), others + order]))


def from_file(family: str, name: str, values: F32) -> F32:
    """Values of a model's tensor, of those in a file."""
    if name.endswith(".A_log"):
        with np.errstate(divide="ignore", invalid="ignore"):  # not finite in a damaged file
            logarithms: F32 = np.log(-values)
        return logarithms
    return values - _added(family, name) if _added(family, name) else values


def to_file(family: str, name: str, values: F32) -> F32:
    """Values in a file, of those of a model's tensor."""
    if name.endswith(".A_log"):
        decays: F32 = -np.exp(values)
        return decays
    return values + _added(family, name) if _added(family, name) else values


def _added(family: str, name: str) -> np.float32:
    """What files have in addition: the 1 of norms that multiply by 1 + w."""
    return np.float32(1 - NORM_NEUTRAL.get(family, 1) if name.endswith("norm.weight") else 0)
