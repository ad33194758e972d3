"""The model classes of mlx-lm, and the configurations of models as these spell them.

Any model type is read by `export.sources.general`. Listed here are the exceptions.

Invariant: the returned configuration has the same meaning to mlx-lm as the given one has to the
original library. A setting that mlx-lm would silently ignore is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from export.sources.general import (
    arguments_of,
    model_class,
    model_classes,
    model_module,
    normalised,
    text_family,
    text_settings,
)
from export.sources.rope import ORIGINAL_LENGTH, checked_scaling, install, turn_part
from export.sources.windows import (
    FULL,
    SLIDING,
    check_windows,
    gemma_windows,
    layer_types,
    unlike_full,
    window_of,
)
from runtime.core.errors import BundleError, UsageError

TEXT_TYPES = {"qwen3_5_text": "qwen3_5"}  # whose module has the text model's class too
# classes of transformers that load a family's fused checkpoints, where its own table has another
_CLASSES = {"gemma3_text": "Gemma3ForCausalLM"}
# transformers' names of tensors -> mlx-lm's, where its class has no `sanitize` that renames them
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("transformer.", ""),),
    "nanochat": (
        *(("model.embed_tokens.", "transformer.wte."), ("model.layers.", "transformer.h.")),
        *((f".self_attn.{one}_proj.", f".attn.c_{one}.") for one in "qkv"),
        *((".self_attn.o_proj.", ".attn.c_proj."), (".fc1.", ".c_fc."), (".fc2.", ".c_proj.")),
    ),
}
# settings that describe a single checkpoint, and not its architecture
_OF_THE_SOURCE = (
    *("quantization", "quantization_config", "torch_dtype", "dtype", "_name_or_path"),
    *("auto_map", "transformers_version", "rope_traditional"),
)

# settings of mlx-lm's classes alone, which do not read them where there is a list by layer
_OF_MLX_LM = {
    "gemma4_text": (
        *("global_partial_rotary_factor", "partial_rotary_factor", "sliding_window_pattern"),
    ),
}

# the weight with which a norm scales by 1, where it is not 1: Gemma multiplies by 1 + w
NORM_NEUTRAL = dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), 0.0)

_OF_ALL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1),
    "rope_traditional": (None, False),  # mlx-lm's: turns neighbours, and no halves
    "is_causal": (None, True),
    "per_layer_config": (None, {}),  # other settings for some layers, as transformers 5 reads them
}
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": (None, "silu"), **_OF_ALL}
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
        **_OF_ALL,
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
# which parts of a head are turned by a place in an image, which for text is the position
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_MEANS_NONE = ("num_key_value_heads", "sliding_window")  # null there is no other way to leave out

_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_MAX_LAYERS = 1024


def check_architecture(raw: dict[str, Any], where: str) -> str:
    """The family of a configuration: the name of the module of mlx-lm with its class.

    Raises:
        BundleError: mlx-lm has none.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    given = raw.get("model_type")
    if not isinstance(given, str):
        raise BundleError(f"{where}: architecture {given!r} is not supported")
    family: str = {**MODEL_REMAPPING, **TEXT_TYPES}.get(given, given)
    if text := text_settings(raw, where):
        family = text_family(family, text.get("model_type"))
    model_module(family, where)
    return family


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
    if not has_list(family, config["model_type"]):
        return normalised(config, family, where, has_lm_head)
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
        gemma_windows(config, where)
    else:
        check_windows(family, config, where)
    if has_lm_head or config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = not has_lm_head
    _check_head_dim(family, config, where)
    _flatten_rope(family, config, where)
    for key in _NUMBERS:
        if key in config and (type(config[key]) not in (int, float) or config[key] <= 0):
            raise BundleError(f"{where}: {key} must be a positive number, is {config[key]!r:.40}")
    return config


def has_list(family: str, model_type: str) -> bool:
    """Whether the settings of a model type are listed here, and not found by tracing."""
    return family in FIXED and model_type == family


def completed_config(family: str, config: dict[str, Any], where: str = "config") -> dict[str, Any]:
    """A normalised configuration with the settings that mlx-lm's model gives it by default.

    Raises BundleError where the model class cannot be built from it.
    """
    build_model(family, config, where)
    arguments = model_classes(family, where)[1].from_dict(deepcopy(config))
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
    for name in _OF_MLX_LM.get(family, ()):
        settings.pop(name, None)
    if family == "gemma3_text":
        pattern = settings["sliding_window_pattern"]
        settings["layer_types"] = layer_types(pattern, settings["num_hidden_layers"])
    if isinstance(pattern := settings.get("sliding_window_pattern"), str):  # mlx-lm's: LLLG
        letters = (pattern * settings["num_hidden_layers"])[: settings["num_hidden_layers"]]
        settings["layer_types"] = [FULL if letter == "G" else SLIDING for letter in letters]
        del settings["sliding_window_pattern"]
    # transformers reads the first name up to 4.55, and both after that
    types = {"torch_dtype": dtype, "dtype": dtype}
    known = _CLASSES.get(family) or model_class(family)
    named = {"architectures": [known] if known else []}
    text_type = next((text for text, outer in TEXT_TYPES.items() if outer == family), None)
    if text_type is None:
        return {**named, **settings, **types}
    tied = settings["tie_word_embeddings"]  # mlx-lm knows no other name of the text model's type
    text = {**settings, "model_type": text_type, **types}
    return {
        **named,
        "model_type": family,
        "text_config": text,
        "tie_word_embeddings": tied,
        **types,
    }


def build_model(family: str, config: dict[str, Any], where: str = "config") -> Any:
    """mlx-lm's own model for a normalised configuration, with random parameters.

    The parameters are lazy: each takes memory only when it is evaluated. Those that are numbers are
    vectors of one, as transformers stores them. Raises BundleError where
    the model class cannot be built from the configuration.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    from export.sources import capped  # loads MLX

    make, settings = model_classes(family, where)
    mx.eval(mx.random.state)  # else lazy parameters depend on those of all models before this one
    try:
        model = make(settings.from_dict(deepcopy(config)))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, AssertionError) as e:
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise BundleError(
            f"{where}: {family} cannot be built from this configuration: {why}"
        ) from e
    install(model)
    capped.install(model)
    if "partial_rotary_factor" not in arguments_of(family):
        turn_part(model, config.get("partial_rotary_factor", 1))
    if hasattr(model, "sanitize"):  # in which mlx-lm drops the output matrix of tied models
        own = dict(tree_flatten(model.parameters()))
        if config.get("tie_word_embeddings", True):
            own.pop("lm_head.weight", None)
        model.sanitize(own)
    model.update(tree_unflatten([(name, one[None]) for name, one in _numbers(model).items()]))
    return model


def _numbers(model: Any) -> dict[str, Any]:
    """The parameters of one of mlx-lm's models that are single numbers, by name."""
    from mlx.utils import tree_flatten

    return {name: value for name, value in tree_flatten(model.parameters()) if not value.ndim}


def stored_numbers(family: str, config: dict[str, Any]) -> set[str]:
    """The parameters that checkpoints hold as numbers, and not as vectors of one.

    mlx-lm's class takes both as numbers: its `sanitize` makes them of vectors.
    """
    import mlx.core as mx

    module = model_module(family)
    model = module.Model(module.ModelArgs.from_dict(config))
    vectors = {name: mx.zeros((1,)) for name in _numbers(model)}
    if vectors and hasattr(model, "sanitize"):
        vectors = model.sanitize(vectors)
    return {name for name, value in vectors.items() if value.ndim}


def expected_shapes(
    family: str, config: dict[str, Any], where: str = "config"
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of the model class, by name; nothing is evaluated."""
    return parameter_shapes(build_model(family, config, where))


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of one of mlx-lm's models, by name.

    Matrices of experts, which mlx-lm stacks as (experts, out, in), are (experts * out, in).
    """
    from mlx.utils import tree_flatten

    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    for name in experts_of(model):
        count, out, width = shapes[name]
        shapes[name] = (count * out, width)
    return shapes


def experts_of(model: Any) -> set[str]:
    """The names of the matrices of experts of one of mlx-lm's models."""
    modules = model.named_modules()
    return {f"{path}.weight" for path, one in modules if type(one).__name__ == "SwitchLinear"}


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """The names of numbers that are not finite, as JSON's 1e999, with their values."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is {value}"
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in inside:
            yield from _not_finite(inner, f"{name}.{key}" if name else str(key))


def text_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of the text half of a model that sees or hears; those of others whole."""
    if not isinstance(raw.get("text_config"), dict) and "num_hidden_layers" in raw:
        for text_type, outer in TEXT_TYPES.items():
            if raw["model_type"] == outer:  # as mlx-lm reads it
                return {**raw, "model_type": text_type}
    text = text_settings(raw, where)
    if text is None or "text_config" in arguments_of(check_architecture(raw, where)):
        return dict(raw)  # in the second case mlx-lm has no class of its own for the text model
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(scope := text.get(key), dict):
            text[key] = {name: value for name, value in scope.items() if name not in _OF_IMAGES}
    return text | {key: raw[key] for key in ("vocab_size", "tie_word_embeddings") if key in raw}


def check_lengths(family: str, config: dict[str, Any], lengths: Sequence[int]) -> None:
    """Raise UsageError for lengths at which a normalised configuration would compute otherwise.

    Two settings are accepted because no sequence is longer than max_position_embeddings: windows
    that are as wide, and longrope within its original length.
    """
    scaling = config.get("rope_scaling") or {}
    limits = {}
    whole = config.get("rope_parameters") or {}
    if whole.get("llama_4_scaling_beta"):  # counts positions, which go on in packed rows
        limits[f"llama_4_scaling_beta with {ORIGINAL_LENGTH}"] = whole[ORIGINAL_LENGTH]
    if family in FIXED and scaling.get("short_factor") != scaling.get("long_factor"):
        limits[f"longrope with {ORIGINAL_LENGTH}"] = scaling[ORIGINAL_LENGTH]
    has_windows = family == "gemma3_text" or (family == "llama" and config.get("layer_types"))
    if family in FIXED and not has_windows and unlike_full(config):
        limits["sliding_window"] = window_of(config)
    for name, longest in limits.items():
        if max(lengths) > longest:
            raise UsageError(
                f"seq_lens has {max(lengths)} tokens, but {name} = {longest} can be computed up to "
                f"that length alone; give --seq-lens of at most {longest}"
            )


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
    flat = [key for key, value in nested.items() if key not in (FULL, SLIDING) and value]
    if flat:
        raise BundleError(
            f"{where}: rope_parameters has {', '.join(map(str, flat))}, which are not used beside "
            f"{FULL} and {SLIDING}; put them into these"
        )
    whole = {**(nested.get(FULL) or {}), **scaling}
    if not whole.get("truncate", True):
        raise BundleError(
            f"{where}: truncate = {whole['truncate']!r} is not supported for gemma3_text, where "
            "transformers does not read it"
        )
    local = nested.get(SLIDING) or {}
    if local and checked_scaling(local, config, where) is not None:
        raise BundleError(
            f"{where}: rope_parameters scales the positions of {SLIDING}, which is not supported"
        )
    if local.get("rope_theta") is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    return whole
