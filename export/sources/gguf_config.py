"""Converts the metadata of a GGUF file to a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from export.sources import gguf_gemma4
from export.sources.families import OF_MLX_LM
from export.sources.general import MAX_LAYERS, settings_class
from export.sources.gguf_entries import BY_SIGMOID, INNER, OF_SCALING, SIGMOID, entries_of
from export.sources.gguf_names import ARCHITECTURES, SEEING, family_of
from export.sources.windows import FULL, SLIDING, layer_types
from export.stored import F32
from runtime.core.errors import BundleError

# tables that files have instead of metadata: Llama 3's, and those of LongRoPE
ROPE_FREQS = "rope_freqs.weight"
FACTORS = {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("short", "long")}
LLAMA3 = ("llama", "apertus")  # families whose table is that of Llama 3
LONGROPE = ("phi3", "minicpm3")
_TABLES = {
    **{family: {*FACTORS.values()} for family in LONGROPE},
    **{family: {ROPE_FREQS} for family in (*LLAMA3, "gemma4_text")},
}

_ROPE_SCALINGS = frozenset({"linear", "yarn"})
_ATTENTION_FACTOR = "rope.scaling.attn_factor"
_HEAD_DIMS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
_PART = "partial_rotary_factor"
_SAME = {"rope_theta": "rotary_emb_base", _PART: "rotary_pct"}  # GPT-NeoX's names
# families that may turn a part of each head
_PARTIAL = (
    *("glm", "glm4", "phi", "phi3", "nemotron", "stablelm", "qwen3_5"),
    *("glm4_moe", "solar_open", "minimax", "gpt_neox"),
)
FURTHER = "nextn_predict_layers"  # the last blocks, which predict the tokens after the next one
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode")
_SHARED = "shared_intermediate_size"  # MiniMax's class asks for it, and does not use it
# whether the weights of a token's experts are divided by their sum, of which files say nothing
_NORMED = {"qwen3_moe": True, "qwen2_moe": False, "olmoe": False}
# a setting -> the layers of which one has a bias where it is on
_TOLD_BY = {
    **dict.fromkeys(("attention_bias", "qkv_bias"), ("attn_q", "attn_qkv")),
    **dict.fromkeys(("attention_out_bias", "use_bias"), ("attn_output",)),
    "mlp_bias": ("ffn_up",),
}
_ALIKE = ("qwen2", "qwen3", "gemma3_text")  # with biases, or without, in every model
_CONVOLUTION = "conv"  # a type of layer
# the one size of each whose attention is not scaled by its head dimension
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
_LOCAL_BASE = {"gemma3_text": 1e4, "gemma4_text": 1e4}  # of positions in layers with windows
# families with windows -> the width without an entry, and one in how many layers has none
WINDOWED = {"gemma2": (4096, 2), "gemma3_text": (0, 6), "gpt_oss": (0, 2)}
WINDOWED |= {"exaone4": (4096, 4), **dict.fromkeys(("cohere2", "olmo3", "afmoe"), (0, 4))}
LISTED = 0  # in place of one in so many: files list the layers
WINDOWED["gemma4_text"] = (0, LISTED)
# MiniCPM 3's scales, which llama.cpp has as constants
_CONSTANTS = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
_EXAONE_32B_LAYERS = 64  # the one size that has them


class Described(Protocol):
    """What a configuration is read from: a file, or what is about to be one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The entries by key."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, each with its `shape`."""

    def rows(self, name: str, index: slice) -> F32:
        """The rows of a tensor."""


def as_stated(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by the names of transformers, with the width that LFM2's MLPs really have."""
    names = settings_class(family).attribute_map.items()
    stated = {**config, **{name: config[own] for name, own in names if own in config}}
    width = stated.get("n_inner") or 4 * stated["hidden_size"]
    stated.setdefault("intermediate_size", width)  # GPT-2's
    if _SHARED in stated and family != "minimax":  # Granite 4's, which then has no experts
        stated["intermediate_size"] = stated[_SHARED]
    if stated.get("block_auto_adjust_ff_dim"):
        part = stated["block_multiple_of"]
        width = int(stated["block_ffn_dim_multiplier"] * int(2 * stated["intermediate_size"] / 3))
        width = -(-width // part) * part
        stated |= {"intermediate_size": width, "block_auto_adjust_ff_dim": False}
    for name in OF_MLX_LM.get(family, ()):
        stated.pop(name, None)
    if family == "gemma4_text":
        stated |= gguf_gemma4.stated(stated)
    for name, same in _SAME.items():
        if same in stated:
            stated[name] = stated.pop(same)
    if family == "minimax":
        stated[_PART] = stated.pop("rotary_dim") / stated["head_dim"]
        stated.pop(_SHARED, None)
    if "linear_value_head_dim" in stated:
        heads = stated["linear_num_value_heads"]
        stated[INNER] = stated["linear_value_head_dim"] * heads
    if family == "minicpm3":
        del stated["head_dim"]  # transformers' name of the part of it that turns
    if nested := stated.pop("rope_parameters", None):
        stated |= {key: nested[key] for key in ("rope_theta", _PART) if key in nested}
        apart = ("rope_theta", "max_position_embeddings", _PART)
        stated["rope_scaling"] = {key: nested[key] for key in nested if key not in apart}
    if pattern := stated.get("sliding_window_pattern"):
        stated["layer_types"] = layer_types(pattern, stated["num_hidden_layers"])
    if _CONVOLUTION in (types := stated.get("layer_types") or ()):
        heads = stated["num_key_value_heads"]
        stated["num_key_value_heads"] = [heads * (kind != _CONVOLUTION) for kind in types]
    return stated


def supported_family(metadata: Mapping[str, Any], where: str) -> str:
    """The family of a file's model. Raises BundleError where its architecture is not known."""
    family = family_of(metadata)
    if family is None:
        arch = metadata.get("general.architecture")
        raise BundleError(
            f"{where}: general.architecture = {arch!r:.60} is not supported; "
            f"supported are {', '.join(sorted({*ARCHITECTURES.values(), *SEEING}))}"
        )
    return family


def read_config(file: Described, where: str) -> dict[str, Any]:
    """The configuration in the spelling of a Hugging Face config.json.

    Raises BundleError for another architecture, or metadata that is missing or makes no sense.
    """
    family = supported_family(file.metadata, where)
    try:
        return _config(_Metadata(file, family, where))
    except (TypeError, ValueError, LookupError, ArithmeticError) as e:  # values of other types
        raise BundleError(f"{where}: the metadata cannot be understood: {e}") from e


@dataclass(frozen=True)
class _Metadata:
    """The entries of a file about its architecture, by keys without the architecture's name."""

    file: Described
    family: str
    where: str

    @property
    def arch(self) -> str:
        """The architecture, with which the keys begin."""
        return str(self.file.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """An entry. Raises BundleError if it is missing and has no default."""
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise BundleError(f"{self.where}: metadata {self.arch}.{key} is missing")
        return value

    def refusal(self, key: str, value: object, way_out: str) -> BundleError:
        """The error for an entry with a value that is not computed."""
        return BundleError(
            f"{self.where}: {self.arch}.{key} = {value!r} is not supported; {way_out}"
        )


def _config(entries: _Metadata) -> dict[str, Any]:
    file, family, get = entries.file, entries.family, entries.get
    hidden, heads, kv_heads = _widths(entries)
    head_dim = _head_dim(entries, hidden // heads)
    layers = get("block_count") - get(FURTHER, 0)
    if not 1 <= layers <= MAX_LAYERS:  # before there is a list of them
        raise entries.refusal("block_count", get("block_count"), f"{layers} layers are no model's")
    defaults = _defaults(entries, head_dim)
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "n_inner" if family == "gpt_bigcode" else "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **{
            name: _number(_or_default(get(key, defaults.get(key)), defaults.get(key, 0)))
            for key, name in entries_of(family).items()
        },
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": float(get("rope.freq_base", 1e4)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if (scaling := _rope_scaling(entries, head_dim)) is not None:
        config["rope_scaling"] = scaling
        if scaling.get("short_factor") != scaling.get("long_factor"):
            config["max_position_embeddings"] = scaling["original_max_position_embeddings"]
    elif family not in ("llama", *_ALIKE):  # transformers scales some families' by default
        config["rope_scaling"] = {"rope_type": "default"}
    if family not in _ALIKE:
        for setting, names in _TOLD_BY.items():
            config[setting] = any(f"blk.0.{name}.bias" in file.tensors for name in names)
    if family in BY_SIGMOID and (given := get("expert_gating_func", SIGMOID)) != SIGMOID:
        raise entries.refusal("expert_gating_func", given, f"it must be {SIGMOID}, a sigmoid")
    if family == "afmoe":
        config["mup_enabled"] = True
    if family == "minimax":
        config |= {"rotary_dim": get("rope.dimension_count", head_dim), _SHARED: 0}
    elif family in _PARTIAL:
        config[_PART] = get("rope.dimension_count", head_dim) / head_dim
    if family in _GEMMA_27B_LAYERS:
        large = layers == _GEMMA_27B_LAYERS[family]
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    base = float(get("rope.freq_base_swa", _LOCAL_BASE.get(family, config["rope_theta"])))
    if family in _LOCAL_BASE:
        config["rope_local_base_freq"] = base
    elif base != config["rope_theta"]:
        raise entries.refusal("rope.freq_base_swa", base, "the base of all layers must be one")
    if not get("rope.scaling.finetuned", True) and "granite" in family:
        raise entries.refusal("rope.scaling.finetuned", False, "each layer must have positions")
    if family in WINDOWED:
        config |= _windows(entries, layers)
    elif window := get("attention.sliding_window", 0):
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if window < config["max_position_embeddings"]:
            way_out = "to train on sequences within it, set context_length to at most its width"
            raise entries.refusal("attention.sliding_window", window, way_out)
    if family == "gpt_neox":
        config |= {same: config.pop(name) for name, same in _SAME.items()}
    if family in _LEARNED_POSITIONS:
        del config["rope_theta"], config["head_dim"]
    if family == "gemma4_text":
        config |= gguf_gemma4.settings(get, file.tensors, config)
        for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
            del config[key]
    if family == "qwen3_5":
        config["linear_value_head_dim"] = config.pop(INNER) // config["linear_num_value_heads"]
        if (keys := config["linear_num_key_heads"]) < 1:
            raise entries.refusal("ssm.group_count", keys, "it must be a positive integer")
    if family == "minicpm3":
        keys = get("attention.key_length") - get("rope.dimension_count")
        config |= {"qk_nope_head_dim": keys, "qk_rope_head_dim": get("rope.dimension_count")}
        config |= _CONSTANTS
        del config["head_dim"]
    if family in _NORMED:
        config["norm_topk_prob"] = _NORMED[family]
    if family == "lfm2":  # says the heads of each layer, none for convolutions
        heads_of = np.ravel(get("attention.head_count_kv")).tolist()
        types = [_CONVOLUTION if not heads else FULL for heads in heads_of]
        config |= {"layer_types": types, "block_auto_adjust_ff_dim": False}
    for key in ("bos_token_id", "eos_token_id"):
        if f"tokenizer.ggml.{key}" in file.metadata:
            config[key] = file.metadata[f"tokenizer.ggml.{key}"]
    return config


def _or_default(value: Any, default: float) -> Any:
    return value if isinstance(value, bool) else value or default


def _number(value: float) -> float | int:
    """A value of float32 as it was written."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _defaults(entries: _Metadata, head_dim: int) -> dict[str, float]:
    """What llama.cpp takes where a file lacks one of these entries, or has 0."""
    width, get = int(np.max(entries.get("feed_forward_length"))), entries.get
    return {
        **{"embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": head_dim**-0.5},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "expert_feed_forward_length": width // max(1, get("expert_used_count", 1)),
        "expert_shared_feed_forward_length": width,
        **{"expert_weights_scale": 1.0, "expert_weights_norm": False, "expert_shared_count": 0},
        **{"leading_dense_block_count": 0, "use_parallel_residual": True},
        **({"full_attention_interval": 4} if entries.family == "qwen3_5" else {}),
        **(gguf_gemma4.DEFAULTS if entries.family == "gemma4_text" else {}),
    }


def _windows(entries: _Metadata, layers: int) -> dict[str, Any]:
    """Which layers see only so many tokens, as llama.cpp reads it: none without a window."""
    width, period = WINDOWED[entries.family]
    window = entries.get("attention.sliding_window", width)
    if entries.family == "exaone4" and layers != _EXAONE_32B_LAYERS:
        window = 0
    pattern = entries.get("attention.sliding_window_pattern", period) if window else 1
    if isinstance(pattern, int):
        types = layer_types(pattern or layers + 1, layers)
    else:  # a value for each layer
        types = [SLIDING if slides else FULL for slides in pattern]
    return {"layer_types": types, "sliding_window": window or None}


def _widths(entries: _Metadata) -> tuple[int, int, int]:
    """The width of the hidden state, the heads of queries, and those of keys and values."""
    hidden, heads = entries.get("embedding_length"), entries.get("attention.head_count")
    kv_heads = entries.get("attention.head_count_kv", heads)
    if entries.family in ("lfm2", "gemma4_text"):  # who say them of each layer
        kv_heads = int(np.max(kv_heads))
    if "token_embd.weight" not in entries.file.tensors:
        raise BundleError(f"{entries.where}: token_embd.weight is missing")
    if not all(isinstance(value, int) and value > 0 for value in (hidden, heads, kv_heads)):
        raise BundleError(
            f"{entries.where}: {entries.arch}.embedding_length, attention.head_count and "
            "attention.head_count_kv must be positive integers, are "
            f"{hidden!r}, {heads!r} and {kv_heads!r}"
        )
    return hidden, heads, kv_heads


def _head_dim(entries: _Metadata, default: int) -> int:
    """The numbers of a head's keys, of which there must be as many in a value and in RoPE."""
    head_dim: int = entries.get("attention.key_length", default)
    if head_dim < 1:
        way_out = "a head must have numbers; without it they are embedding_length / head_count"
        raise entries.refusal("attention.key_length", head_dim, way_out)
    if entries.family == "minicpm3":
        if (given := entries.get("attention.value_length", default)) != default:
            must = f"values of a head must have {default} numbers"
            raise entries.refusal("attention.value_length", given, must)
        return default
    for key in _HEAD_DIMS:
        if key == "rope.dimension_count" and entries.family in _PARTIAL:
            continue
        if key.endswith("_swa") and entries.family == "gemma4_text":
            continue
        if (given := entries.get(key, head_dim)) != head_dim:
            must = f"values, keys and positions must have the {head_dim} numbers of a head's keys"
            raise entries.refusal(key, given, must)
    return head_dim


def _rope_scaling(entries: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """RoPE scaling from the metadata, or from tables of factors.

    The defaults are those of llama.cpp's loader, which has an older name of the factor, too.
    """
    arch, where = entries.arch, entries.where
    rope_type = entries.get("rope.scaling.type", "linear")
    factor = float(entries.get("rope.scaling.factor", entries.get("rope.scale_linear", 0)) or 1)
    is_plain = rope_type == "none" or (rope_type == "linear" and factor == 1)
    tables = rope_tables(entries.file)
    is_long = tables == {*FACTORS.values()}
    if tables and not (is_plain or (is_long and rope_type == "longrope" and factor == 1)):
        raise BundleError(
            f"{where}: {' and '.join(sorted(tables))} beside {arch}.rope.scaling.type "
            f"{rope_type!r} with factor {factor:g} is not supported; one of both must go"
        )
    if is_long:
        return _longrope(entries, head_dim)
    if (given := entries.get(_ATTENTION_FACTOR, 1)) != 1:
        raise entries.refusal(_ATTENTION_FACTOR, given, f"it is 1 without {FACTORS['long_factor']}")
    if tables:
        return _tabled_scaling(entries, head_dim)
    if is_plain:
        return None
    if rope_type not in _ROPE_SCALINGS:
        supported = f"supported are {', '.join(sorted(_ROPE_SCALINGS))} and Llama 3's"
        raise entries.refusal("rope.scaling.type", rope_type, supported)
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        if factor < 1:  # for which llama.cpp and transformers scale queries and keys otherwise
            raise entries.refusal("rope.scaling.factor", factor, "it must be at least 1")
        length = entries.get("rope.scaling.original_context_length", entries.get("context_length"))
        scaling["original_max_position_embeddings"] = length
    for key, name in OF_SCALING.get(entries.family, {}).items():
        scaling[name] = _number(entries.get(key, 0.0))
    if "mscale_all_dim" in scaling:  # llama.cpp has one for both
        scaling["mscale"] = scaling["mscale_all_dim"]
    return scaling


def rope_tables(file: Described) -> set[str]:
    """The tables of RoPE factors in a file that are read for its architecture."""
    tables = _TABLES.get(str(family_of(file.metadata)), set())
    return tables if tables <= file.tensors.keys() else set()


def _longrope(entries: _Metadata, head_dim: int) -> dict[str, Any]:
    """Phi 3's scaling, of which the long factors are for sequences beyond the original length."""
    tables = {
        key: [_number(float(value)) for value in entries.file.rows(table, slice(None))]
        for key, table in FACTORS.items()
    }
    pairs = entries.get("rope.dimension_count", head_dim) // 2
    if {*map(len, tables.values())} != {pairs}:
        raise BundleError(
            f"{entries.where}: its tables of RoPE factors do not have {pairs} numbers"
        )
    return {
        "rope_type": "longrope",
        "attention_factor": _number(entries.get(_ATTENTION_FACTOR, 1.0)),
        "original_max_position_embeddings": entries.get("rope.scaling.original_context_length"),
        **tables,
    }


def _tabled_scaling(entries: _Metadata, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3, or of Gemma 4, that a file's table was made by."""
    factors = entries.file.rows(ROPE_FREQS, slice(None))
    if entries.family == "gemma4_text":
        return gguf_gemma4.scaling_of(factors, head_dim)
    scaling = {
        **{"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    base = float(entries.get("rope.freq_base", 1e4))
    known = np.isfinite(factors).all() and factors.min() > 0
    published = llama3_factors(base, head_dim, scaling) if known else factors[:0]
    if factors.shape != published.shape or not np.allclose(factors, published, rtol=1e-4):
        raise BundleError(f"{entries.where}: {ROPE_FREQS} is not one of Llama 3's scalings")
    return scaling


def llama3_factors(base: float, head_dim: int, scaling: dict[str, Any]) -> F32:
    """The factors (head_dim / 2,) by which Llama 3 divides the rotary frequencies."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    # 1 for short waves, `factor` for long ones, a blend of their inverses between
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    factors: F32 = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    return factors
