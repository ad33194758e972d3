"""The architectures that can be exported, and their configurations as mlx-lm spells them.

Invariant: the returned configuration has the same meaning to mlx-lm as the given one has to the
original library. A setting that mlx-lm would silently ignore is refused by name.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

from export.sources.rope import ORIGINAL_LENGTH, checked_scaling, install
from runtime.core.errors import BundleError

# Hugging Face model_type -> module under mlx_lm.models
MODEL_TYPES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "gemma3": "gemma3_text",  # with a vision tower: its text_config counts
    "gemma3_text": "gemma3_text",
}

# family -> the class of transformers that loads it
_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# settings that describe a single checkpoint, and not its architecture
_OF_THE_SOURCE = (
    *("quantization", "quantization_config", "torch_dtype", "dtype", "_name_or_path"),
    *("auto_map", "transformers_version", "rope_traditional"),
)

# the weight with which a norm scales by 1: Gemma multiplies by 1 + w
NORM_NEUTRAL = {"qwen2": 1.0, "qwen3": 1.0, "llama": 1.0, "gemma3_text": 0.0}

_WHOLE_HEADS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1),
    "rope_traditional": (None, False),  # mlx-lm's: turns neighbours, and no halves
}
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": (None, "silu"), **_WHOLE_HEADS}
# settings for which the model classes know only these values (None: absent)
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen2": _SILU,
    "qwen3": _SILU | {"attention_bias": (None, False)},
    "llama": _SILU,
    "gemma3_text": {
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "attention_bias": (None, False),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
        **_WHOLE_HEADS,
    },
}
# what transformers takes where a configuration leaves a setting out; mlx-lm takes others in places
_QWEN = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32768,
    "num_key_value_heads": 32, "vocab_size": 151936, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
LEFT_OUT: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "llama": {
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048,
        "vocab_size": 32000,
    },
    "gemma3_text": {
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "vocab_size": 262208,
    },
}  # fmt: skip
_MEANS_NONE = ("num_key_value_heads", "sliding_window")  # null there is no other way to leave out
_FULL, _SLIDING = "full_attention", "sliding_attention"

_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_MAX_LAYERS = 1024


def check_architecture(raw: dict[str, Any], where: str) -> str:
    """The family of a configuration.

    Raises:
        BundleError: its architecture is not supported.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise BundleError(
            f"{where}: architecture {model_type!r} is not supported; "
            f"supported are {', '.join(sorted(MODEL_TYPES))}"
        )
    return MODEL_TYPES[model_type]


def normalise_config(raw: dict[str, Any], where: str, has_lm_head: bool) -> dict[str, Any]:
    """The language model's configuration, as mlx-lm's ModelArgs spells it.

    Args:
        raw: the content of a Hugging Face config.json, of any version of transformers.
        where: the file, for messages.
        has_lm_head: whether the source holds an output matrix of its own. It says whether the
            embedding is tied, but where the configuration denies that and there is none.

    Returns the configuration; its "model_type" is the family. Raises BundleError for an
    architecture or a setting that is not supported.
    """
    try:
        return _normalise(raw, where, has_lm_head)
    except (TypeError, ValueError, AttributeError) as e:  # a value of an unexpected type
        raise BundleError(f"{where}: the configuration cannot be understood: {e}") from e


def _normalise(raw: dict[str, Any], where: str, has_lm_head: bool) -> dict[str, Any]:
    family = check_architecture(raw, where)
    config = text_config(raw, where)
    for key, value in LEFT_OUT.get(family, {}).items():
        if key not in config or (config[key] is None and key not in _MEANS_NONE):
            config[key] = value
    config["model_type"] = family
    if wrong := next(_not_finite(config), None):
        raise BundleError(f"{where}: {wrong}, not a finite number")
    for key, allowed in FIXED[family].items():
        if config.get(key) not in allowed:
            raise BundleError(
                f"{where}: {key} = {config[key]!r} is not supported for {family}; supported is "
                f"{' or '.join(repr(value) for value in allowed if value is not None) or 'none'}"
            )
    for key in _SIZES:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise BundleError(f"{where}: {key} must be a positive integer, is {value!r}")
    if config["num_hidden_layers"] > _MAX_LAYERS:
        raise BundleError(
            f"{where}: num_hidden_layers is {config['num_hidden_layers']}; at most {_MAX_LAYERS} "
            "are supported"
        )
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if family == "gemma3_text":
        _gemma_windows(config, where)
        config["tie_word_embeddings"] = not has_lm_head
    else:
        _check_windows(family, config, where)
        if has_lm_head or config.get("tie_word_embeddings") is None:
            config["tie_word_embeddings"] = not has_lm_head
    _check_head_dim(family, config, where)
    _flatten_rope(family, config, where)
    for key in _NUMBERS:
        if key in config and (type(config[key]) not in (int, float) or config[key] <= 0):
            raise BundleError(f"{where}: {key} must be a positive number, is {config[key]!r:.40}")
    return config


def completed_config(family: str, config: dict[str, Any], where: str = "config") -> dict[str, Any]:
    """A normalised configuration with the settings that mlx-lm's model gives it by default.

    Raises BundleError where the model class cannot be built from it.
    """
    build_model(family, config, where)
    arguments = importlib.import_module(f"mlx_lm.models.{family}").ModelArgs.from_dict(config)
    defaults = {
        key: value
        for key, value in vars(arguments).items()
        if isinstance(value, bool | int | float | str)
    }
    return {**config, **{key: value for key, value in defaults.items() if key not in config}}


def transformers_config(family: str, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json for a normalised configuration, so that transformers reads it too.

    Settings that the configuration leaves out are written as mlx-lm's model takes them: the
    defaults of transformers are others in places. `dtype` is the type of the weights.
    """
    settings = {
        key: value
        for key, value in completed_config(family, config).items()
        if key not in _OF_THE_SOURCE
    }
    if family == "gemma3_text":
        pattern = settings["sliding_window_pattern"]
        settings["layer_types"] = _layer_types(pattern, settings["num_hidden_layers"])
    # transformers reads the first name up to 4.55, and both after that
    types = {"torch_dtype": dtype, "dtype": dtype}
    return {"architectures": [_CLASSES[family]], **settings, **types}


def build_model(family: str, config: dict[str, Any], where: str = "config") -> Any:
    """mlx-lm's own model for a normalised configuration, with random parameters.

    The parameters are lazy: each takes memory only when it is evaluated. Raises BundleError where
    the model class cannot be built from the configuration.
    """
    from mlx.utils import tree_flatten

    try:
        module = importlib.import_module(f"mlx_lm.models.{family}")
    except (ImportError, SystemExit) as e:  # there is none, or a package that it needs is missing
        raise BundleError(f"{where}: mlx-lm cannot load architecture {family!r:.40}: {e}") from e
    try:
        model = module.Model(module.ModelArgs.from_dict(config))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, AssertionError) as e:
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise BundleError(
            f"{where}: {family} cannot be built from this configuration: {why}"
        ) from e
    install(model)
    if hasattr(model, "sanitize"):  # in which mlx-lm drops the output matrix of tied models
        own = dict(tree_flatten(model.parameters()))
        if config.get("tie_word_embeddings", True):
            own.pop("lm_head.weight", None)
        model.sanitize(own)
    return model


def expected_shapes(
    family: str, config: dict[str, Any], where: str = "config"
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of the model class, by name; nothing is evaluated."""
    from mlx.utils import tree_flatten

    parameters = tree_flatten(build_model(family, config, where).parameters())
    return {name: tuple(array.shape) for name, array in parameters}


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """The names of numbers that are not finite, as JSON's 1e999, with their values."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is {value}"
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in inside:
            yield from _not_finite(inner, f"{name}.{key}" if name else str(key))


def text_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The text half of a multimodal Gemma 3; others whole."""
    if raw["model_type"] != "gemma3":
        return dict(raw)
    if not isinstance(raw.get("text_config"), dict):
        raise BundleError(f"{where}: a gemma3 configuration needs a text_config")
    text = dict(raw["text_config"])
    if "vocab_size" in raw:
        text["vocab_size"] = raw["vocab_size"]
    return text


def _gemma_windows(config: dict[str, Any], where: str) -> None:
    """Set "sliding_window_pattern", mlx-lm's key: one layer in so many has global attention.

    As in transformers, "layer_types" decides where it is there.
    """
    layer_types = config.get("layer_types")
    if layer_types:
        full = [i for i, name in enumerate(layer_types) if name == _FULL]
        pattern = full[0] + 1 if full else len(layer_types) + 1
    else:
        patterns = (
            config.get(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")
        )
        pattern = next((value for value in patterns if value is not None), 6)
    if not isinstance(pattern, int) or pattern < 1:
        raise BundleError(f"{where}: sliding_window_pattern must be positive, is {pattern!r}")
    types = _layer_types(pattern, config["num_hidden_layers"])
    if layer_types and list(layer_types) != types:
        raise BundleError(
            f"{where}: layer_types is not one full_attention in every {pattern} layers; "
            "irregular patterns are not supported"
        )
    if _FULL not in types:
        raise BundleError(
            f"{where}: none of {len(types)} layers sees all tokens (layer_types, "
            f"sliding_window_pattern = {pattern}); a model without such a layer is not supported"
        )
    window = config.get("sliding_window")
    if _SLIDING in types and (not isinstance(window, int) or window < 1):
        raise BundleError(f"{where}: sliding_window must be a positive integer, is {window!r}")
    config["sliding_window_pattern"] = pattern


def _layer_types(pattern: int, layers: int) -> list[str]:
    """Types of attention of which every `pattern`-th is global."""
    return [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]


def _check_windows(family: str, config: dict[str, Any], where: str) -> None:
    """Raise BundleError where a layer sees only so many tokens: these families' layers see all.

    Qwen's configurations say `use_sliding_window` and from which layer on (`max_window_layers`).
    Llama's know no windows in transformers, and mlx-lm's take them from `layer_types` alone.
    """
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = config.get("layer_types") or [
        _FULL if window is None or layer < config.get("max_window_layers", 0) else _SLIDING
        for layer in range(config["num_hidden_layers"])
    ]
    if unlike := sorted({*map(str, types)} - {_FULL}):
        longest = config.get("max_position_embeddings")
        if unlike != [_SLIDING] or window is None or longest is None or window < longest:
            raise BundleError(
                f"{where}: layers with {', '.join(unlike)} (layer_types, sliding_window = "
                f"{window!r}) are not supported for {family}: its layers see all tokens before. "
                "Delete these settings there if the original model computes without them; or, to "
                "train on sequences within the window, set max_position_embeddings (now "
                f"{longest}) to at most its width"
            )
        config.pop("layer_types", None)  # no sequence is longer than the window


def _check_head_dim(family: str, config: dict[str, Any], where: str) -> None:
    """Raise BundleError for a width of heads that Qwen 2's class in mlx-lm does not read."""
    implied, given = config["hidden_size"] // config["num_attention_heads"], config.get("head_dim")
    if family == "qwen2" and given not in (None, implied):
        raise BundleError(
            f"{where}: head_dim = {given!r} is not supported for qwen2; supported is hidden_size / "
            f"num_attention_heads, {implied}"
        )


def _flatten_rope(family: str, config: dict[str, Any], where: str) -> None:
    """Set "rope_theta" and "rope_scaling", which transformers 5 nests in "rope_parameters".

    For Gemma they are nested once more, by type of layer, and a "rope_scaling" is of the global
    ones. A base that is nested counts, as there.
    """
    nested = config.pop("rope_parameters", None) or {}
    scope = config.get("rope_scaling") or {}
    lengths = dict(config)
    if family == "gemma3_text":
        lengths.pop(ORIGINAL_LENGTH, None)  # counts inside of a scaling alone
        scope = _gemma_rope(nested, scope, config, where)
    else:
        scope = scope or nested
    if scope.get("rope_theta") is not None:
        config["rope_theta"] = scope["rope_theta"]
    config["rope_scaling"] = checked_scaling(scope, lengths, where)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        if key in config and config[key] is None:
            del config[key]


def _gemma_rope(
    nested: dict[str, Any], scaling: dict[str, Any], config: dict[str, Any], where: str
) -> dict[str, Any]:
    """The settings of the global layers; sets "rope_local_base_freq", the base of the others.

    Raises BundleError for settings that transformers reads for no layer, or otherwise.
    """
    flat = [key for key, value in nested.items() if key not in (_FULL, _SLIDING) and value]
    if flat:
        raise BundleError(
            f"{where}: rope_parameters has {', '.join(map(str, flat))}, which are not used beside "
            f"{_FULL} and {_SLIDING}; put them into these"
        )
    whole = {**(nested.get(_FULL) or {}), **scaling}
    if not whole.get("truncate", True):
        raise BundleError(
            f"{where}: truncate = {whole['truncate']!r} is not supported for gemma3_text, where "
            "transformers does not read it"
        )
    local = nested.get(_SLIDING) or {}
    if local and checked_scaling(local, config, where) is not None:
        raise BundleError(
            f"{where}: rope_parameters scales the positions of {_SLIDING}, which is not supported"
        )
    if local.get("rope_theta") is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    return whole
