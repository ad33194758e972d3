"""Configurations of any model type of mlx-lm: completed by transformers, and flat.

transformers' own class fills in what a configuration leaves out, and knows each spelling of rotary
positions, of any year. What mlx-lm's class takes is then flat, under its own names.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from export.sources.misread import MISREAD, RefusedError, misread
from export.sources.model_classes import arguments_of, parameters_of
from export.sources.rope import (
    BESIDE_SCALING,
    ORIGINAL_LENGTH,
    SETTINGS,
    checked_scaling,
    with_fixed_base,
)
from export.sources.windows import FULL, SLIDING, pattern_of
from runtime.core.errors import BundleError

# names that mlx-lm's classes have for the same setting, the first of which is transformers'
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
_SCALES_FULL_ALONE = {"olmo3"}  # in layers with a window, positions are not scaled
_LAYER_NAMES = {"granitemoehybrid": {"full_attention": "attention", "linear_attention": "mamba"}}
_SAME = (
    *(
        _LAYERS,
        ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"),
    ),
    ("n_positions", "n_ctx"),
    ("hidden_size", "block_dim"),
    ("num_local_experts", "num_experts"),
)
_BASES = ("rope_theta", "rotary_emb_base")
_TURNED = ("partial_rotary_factor", "rotary_pct")
# what numbers of positions must be, the least and the most
_RANGES = {
    **dict.fromkeys(_BASES, ("a positive number", math.ulp(0), math.inf)),
    **dict.fromkeys(_TURNED, ("above 0 and at most 1", math.ulp(0), 1)),
    "llama_4_scaling_beta": ("a number of at least 0", 0, math.inf),
}
_OF_POSITIONS = {
    "rope_type",
    "type",
    *_RANGES,
    *(name for names in SETTINGS.values() for name in names),
}
LOCAL_BASE = "rope_local_base_freq"  # of layers with a window, which do not scale positions
_POSITIVE = re.compile(
    "(eps|epsilon|^rope_theta|base_freq|attn_scalar|_multiplier|logits_scaling|logit_scale)$"
)
# how many experts a layer has
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = re.compile("experts_per_tok(en)?$|top_k_experts$|moe_topk$")  # of a token's experts
MAX_LAYERS = 1024
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
}
# of the file, and of classifiers: transformers names as many labels as a file says
_NOT_OF_DECODERS = {
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("dtype", "torch_dtype", "quantization", "quantization_config"),
}
# in transformers' messages: types, and what they begin with
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_ERROR = re.compile(r"Validation error for field '\w+':\s+TypeError: |(?<=:)\n *\w+Error:")
_UNBOUNDED = "time_step_limit"  # of state spaces
# the names that transformers has for the setting of the activation
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")
# what is kept although mlx-lm's class may not take it
_KEPT = (
    *("vocab_size", "max_position_embeddings", "pad_token_id", "rms_norm_eps"),
    *ACTIVATION,
)
# what is of the file, or is kept under another name
_OTHERWISE = {
    *("architectures", "dtype", "transformers_version", "rope_parameters", "rope_scaling"),
    *(*_BASES, *_TURNED),
}
_NEEDED = inspect.Parameter.empty  # the default of an argument without one
# arguments that classes of mlx-lm need and transformers has no setting for -> what it computes
_ABSENT = {
    **{"rope_scaling": None, "sliding_window": None, "sliding_window_pattern": None},
    **{"attention_bias": False, "mlp_bias": False, "post_norm": False, "qk_norm": True},
}


def completed(raw: dict[str, Any]) -> dict[str, Any] | None:
    """A configuration with transformers' defaults; None where it has no class for its type.

    Raises RefusedError where that class refuses it, and any other error where it cannot be read.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError

    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    said, kind = transformers.logging.get_verbosity(), settings_class(raw["model_type"])
    transformers.logging.set_verbosity_error()
    needed = {field.name for field in fields(kind) if "None" not in str(field.type)}
    stated = {key: value for key, value in raw.items() if value is not None or key not in needed}
    try:
        whole = kind.from_dict(_decoded(stated))
        made: dict[str, Any] = whole.to_dict()
    except StrictDataclassClassValidationError as e:
        if isinstance(e.__cause__, TypeError):  # in its arithmetic
            raise e.__cause__ from None
        raise RefusedError(f"transformers refuses it: {e.__cause__ or e}") from e
    except (StrictDataclassError, KeyError) as e:  # a KeyError says which it needs
        reason = _CLASS.sub(r"\1", str(e).partition(". Errors: ")[0])
        raise RefusedError(f"transformers refuses it: {_ERROR.sub('', reason)}") from e
    finally:
        transformers.logging.set_verbosity(said)
    return made


def _decoded(value: Any) -> Any:
    """A configuration's value, with numbers such as {"__float__": "Infinity"} as they are."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        for key in _LAYERS:  # before transformers lists them
            if type(value.get(key)) is int and value[key] > MAX_LAYERS:
                raise RefusedError(f"{key} must be from 1 to {MAX_LAYERS}, is {value[key]!r:.40}")
        return {key: _decoded(inner) for key, inner in value.items() if key not in _NOT_OF_DECODERS}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def text_settings(raw: dict[str, Any], where: str) -> dict[str, Any] | None:
    """The settings of the text model inside of one that sees or hears; None where there is none.

    Configurations of earlier years have them beside those of the tower, as Qwen2-VL's. Raises
    BundleError where they cannot be understood.
    """
    import transformers

    text = raw.get("text_config")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        return dict(text)
    known = raw["model_type"] in transformers.CONFIG_MAPPING
    kind = transformers.CONFIG_MAPPING[raw["model_type"]] if known else None
    if "text_config" not in (getattr(kind, "sub_configs", None) or {}):
        return None
    try:
        whole: dict[str, Any] = (completed(raw) or {})["text_config"]
        return {**text, "model_type": whole["model_type"]} if text else whole
    except MISREAD as e:
        raise misread(e, where, "its text_config cannot be understood") from e


def settings_of(raw: dict[str, Any], family: str, where: str) -> dict[str, Any]:
    """A configuration with what transformers takes where it leaves something out, and flat."""
    return flat(completed(raw) or dict(raw), family, where)


def default_settings(model_type: str, family: str) -> dict[str, Any] | None:
    """What transformers takes where a configuration says nothing, flat; None without a class."""
    made = completed({"model_type": model_type})
    known = arguments_of(family)
    absent = {key: value for key, value in _ABSENT.items() if key in known and value is not None}
    return made and {**absent, **flat(made, family, model_type)}


def normalised(raw: dict[str, Any], family: str, where: str, has_lm_head: bool) -> dict[str, Any]:
    """The argument of `ModelArgs.from_dict`, always with the number of layers.

    For the arguments and errors see `families.normalise_config`.
    """
    known = arguments_of(family)
    for key, value in raw.items():
        is_dropped = type(value) is int and key not in known and key not in _KEPT
        if not is_finite(value) and key not in (_UNBOUNDED, *_NOT_OF_DECODERS) and not is_dropped:
            path, number = _not_finite(key, value)
            raise BundleError(f"{where}: {path} is {number!r:.80}, not a finite number of 64 bits")
    _check_positions(raw, where)
    _check_layer_types(raw, known, where)
    full = settings_of(raw, family, where)
    layers = next((full[name] for name in _LAYERS if full.get(name) is not None), None)
    if "text_config" in known and "text_config" in raw:
        raise BundleError(
            f"{where}: mlx-lm's {family} has no class of its own for the text model inside, which "
            "is not supported"
        )
    defaults = default_settings(str(raw.get("model_type")), family) or {}
    _check_numbers({**dict.fromkeys(defaults), **full}, defaults, layers, where)
    config = {
        key: value
        for key, value in full.items()
        if key in known or key in _KEPT
        if (value is not None or "window" in key or "softcap" in key) and is_finite(value)
    }
    config |= _others_needed(family, config, full)
    if "n_positions" in full:
        config.setdefault("max_position_embeddings", full["n_positions"])
    if defaults.get(_TURNED[0]) is not None and _TURNED[0] in full:
        config.setdefault(_TURNED[0], full[_TURNED[0]])  # computed even where the class does not
    if full.get("rope_scaling") and not known & {"rope_scaling", "rope_parameters"}:
        config["rope_scaling"] = full["rope_scaling"]  # computed even where the class does not
    others = defaults.keys() - config.keys() - known - _OTHERWISE
    for key in sorted(others):  # which transformers reads
        if key in full and full[key] != defaults[key] and is_finite(full[key]):
            config[key] = full[key]
    tied = full.get("tie_word_embeddings")
    config["tie_word_embeddings"] = not has_lm_head if has_lm_head or tied is None else tied
    return {**config, "model_type": family, "num_hidden_layers": layers}


def _check_numbers(
    full: Mapping[str, Any], defaults: Mapping[str, Any], layers: object, where: str
) -> None:
    """Raise BundleError for sizes of a configuration, and other numbers, that make no sense."""
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        raise BundleError(
            f"{where}: num_hidden_layers must be from 1 to {MAX_LAYERS}, is {layers!r:.40}"
        )
    counts = (full.get(name) for name in EXPERTS)
    experts = next((count for count in counts if type(count) is int and count > 0), 0)
    own_types = _own_types(str(full.get("model_type")))
    for key, value in full.items():
        if value is None and defaults.get(key) is None:
            continue
        if key in _SIZES and (type(value) is not int or value < 1):
            raise BundleError(f"{where}: {key} must be a positive integer, is {value!r:.40}")
        if _POSITIVE.search(key) and (type(value) not in (int, float) or value <= 0):
            raise BundleError(f"{where}: {key} must be a positive number, is {value!r:.40}")
        if key == "sliding_window" and value not in (None, defaults.get(key)) and not own_types:
            _check_window(value, where)  # where types say which layers have one, it is with them
        if experts and _CHOSEN.search(key) and not (type(value) is int and 0 < value <= experts):
            raise BundleError(f"{where}: {key} must be from 1 to {experts}, is {value!r:.40}")


def _check_layer_types(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise BundleError for a type of layer that mlx-lm's class would take for another in silence.

    Its classes compare each with one name, and know those that transformers has by default.
    """
    types = raw.get("layer_types")
    if not isinstance(types, list) or {*map(str, types)} <= {FULL}:
        return
    own = _own_types(raw["model_type"])
    by_convolution = "full_attn_idxs" in known  # LFM2's, in every layer without attention
    kinds = {FULL, "conv" if by_convolution else SLIDING, *own}
    kinds |= {word for pair in _LAYER_NAMES.get(raw["model_type"], {}).items() for word in pair}
    others = [kind for kind in types if not isinstance(kind, str) or kind not in kinds]
    if others:
        raise BundleError(
            f"{where}: layer_types has {others[0]!r:.40}, which is not supported; supported are "
            f"{', '.join(sorted(kinds))}"
        )


def _own_types(model_type: str) -> Collection[str]:
    """The types of layers that transformers has by default; empty where it reads none."""
    return (completed({"model_type": model_type}) or {}).get("layer_types") or ()


def settings_class(model_type: str) -> Any:
    """transformers' class of a type's settings."""
    import transformers

    return transformers.CONFIG_MAPPING[model_type]


def known_name(key: str, known: Collection[str]) -> str:
    """The name that a class whose arguments are `known` has for a setting; else the name itself."""
    same = next((names for names in _SAME if key in names), ())
    return key if key in known else next((name for name in same if name in known), key)


def _others_needed(family: str, config: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm's class needs and transformers has under another name, or no setting for."""
    heads, needed = config.get("num_attention_heads"), {}
    for name, parameter in parameters_of(family).items():
        if name in config or (name != "num_key_value_heads" and parameter.default is not _NEEDED):
            continue
        same = next((names for names in _SAME if name in names), ())
        value = next((full[other] for other in same if other in full), _ABSENT.get(name))
        if name == "num_key_value_heads":
            value = heads
        elif name == "head_dim" and heads and full.get("hidden_size"):
            value = full["hidden_size"] // heads
        elif name == "n_inner" and full.get("n_embd"):
            value = 4 * full["n_embd"]
        if value is not None or name in _ABSENT:
            needed[name] = value
    return needed


def is_finite(value: Any) -> bool:
    """Whether a manifest can hold a value; limits of time steps may be infinite."""
    if isinstance(value, list | tuple | dict):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _not_finite(path: str, value: Any) -> tuple[str, Any]:
    """The place of a value inside of a setting that a manifest cannot hold, and the value."""
    inner = value.items() if isinstance(value, dict) else ()
    for key, part in inner:
        if not is_finite(part):
            return _not_finite(f"{path}.{key}", part)
    return path, value


def flat(full: dict[str, Any], family: str, where: str) -> dict[str, Any]:
    """Settings with those of rotary positions under the names that mlx-lm's class has for them."""
    if full.get("layer_types"):
        full.pop("full_attn_idxs", None)  # of which transformers has made these
    full |= {key: "silu" for key in ACTIVATION if full.get(key) == "swish"}  # the same function
    if "global_head_dim" in arguments_of(family):
        full |= _of_gemma4(full, where)
    _set_positions(full, family, where)
    _set_layer_types(full, family, where)
    return full


def _set_positions(full: dict[str, Any], family: str, where: str) -> None:
    """Say rotary positions as mlx-lm's class takes them."""
    known, whole = arguments_of(family), parameters_of(family).get("rope_parameters")
    nested = full.get("rope_parameters") or {}
    scope = dict(full.get("rope_scaling") or {}) or _one_scope(nested, full, family, where)
    scope = with_fixed_base(scope, full)
    base_alone = {*nested} <= {"rope_theta", "rope_type"} and "rope_theta" in known
    by_type = any(isinstance(value, dict) for value in nested.values())
    # those of each type of layer stay apart
    nests = whole is not None and whole.default is not None and not by_type
    beside = {"rope_theta", "rope_scaling"} <= known and not by_type and not nests
    needed = whole is not None and whole.default is _NEEDED
    if whole is None or ((base_alone or beside) and not needed):
        full.pop("rope_parameters", None)
    full.pop("rope_scaling", None)
    for names in (_BASES, _TURNED):
        value = scope.pop(names[0], None)
        if (value := full.get(names[0]) if value is None else value) is not None:
            full[next((name for name in names if name in known), names[0])] = value
    if whole is not None:  # a class that takes them whole
        scope = {key: value for key, value in scope.items() if key not in BESIDE_SCALING}
    scaling = checked_scaling(scope, full, where)
    if scaling and scaling["rope_type"] == "longrope":  # Phi 3's class reads the older name
        scaling = {**scaling, "type": "longrope"}
    full["rope_scaling"] = scaling
    if "rope_parameters" in full and nests:
        _nest_positions(full)
    elif "rope_parameters" in full:  # where the class finds the same
        for key in {"rope_scaling", _BASES[0], _TURNED[0]} - known:
            full.pop(key, None)


def _check_positions(settings: Mapping[str, Any], where: str) -> None:
    """Raise BundleError for a number of rotary positions, at any depth, that makes no sense."""
    for key, value in settings.items():
        if isinstance(value, dict) and key not in _OF_POSITIONS:
            _check_positions(value, where)
        elif value is not None and key in _RANGES:
            wanted, least, most = _RANGES[key]
            if type(value) not in (int, float) or not least <= value <= most:
                raise BundleError(f"{where}: {key} must be {wanted}, is {value!r:.40}")
        elif isinstance(value, dict):
            raise BundleError(
                f"{where}: {key} of rotary positions must be no object, is {value!r:.40}"
            )


def _set_layer_types(full: dict[str, Any], family: str, where: str) -> None:
    """Say which layers have a window, or no attention, as mlx-lm's class takes it."""
    known = arguments_of(family)
    if words := _LAYER_NAMES.get(family):
        full["layer_types"] = [words.get(kind, kind) for kind in full.get("layer_types") or []]
        full["position_embedding_type"] = full.get("position_embedding_type") or "nope"
    if SLIDING in (full.get("layer_types") or ()):
        _check_window(full.get("sliding_window"), where)
    full.pop("_sliding_window_pattern", None)  # transformers writes it beside what it reads
    if "layer_types" in known:
        return
    if "sliding_window_pattern" in known and full.get("layer_types"):
        written = str(parameters_of(family)["sliding_window_pattern"].annotation)
        types, letters = full.pop("layer_types"), "str" in written
        # beside layers with a window, those without have no positions
        has_none = letters and full.get("sliding_window") is None and {*types} == {FULL}
        full["sliding_window_pattern"] = None if has_none else pattern_of(types, letters, where)
    if "full_attention_interval" in known and (types := full.pop("layer_types", None)):
        full["full_attention_interval"] = _interval_of(list(types), where)


def _of_gemma4(full: dict[str, Any], where: str) -> dict[str, Any]:
    """Sizes of heads without a window, which transformers has by layer, and what it has not."""
    whole = [at for at, kind in enumerate(full.get("layer_types") or []) if kind == FULL]
    own = {int(at): dict(sizes) for at, sizes in (full.pop("per_layer_config", None) or {}).items()}
    sizes = own.get(whole[0], {}) if whole else {}
    known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if any(own.get(at, {}) != sizes for at in whole) or {*own} - {*whole} or {*sizes} - {*known}:
        raise BundleError(f"{where}: per_layer_config differs otherwise than by {FULL}: {own}")
    without = {"hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"}
    return dict.fromkeys(without - full.keys(), 0) | {known[key]: sizes[key] for key in sizes}


def _nest_positions(full: dict[str, Any]) -> None:
    """Put the settings of positions where a class reads them that has own ones by default."""
    scaling = full.pop("rope_scaling") or {}
    nested = {**scaling, "type": scaling.get("rope_type", "default")}
    names = (*_BASES, *_TURNED)
    full["rope_parameters"] = nested | {key: full.pop(key) for key in names if key in full}


def _interval_of(types: list[str], where: str) -> int:
    """In every so many layers the last one has attention, the others the gated delta rule."""
    interval = types.index(FULL) + 1 if FULL in types else len(types) + 1
    expected = [
        FULL if (at + 1) % interval == 0 else "linear_attention" for at in range(len(types))
    ]
    if types != expected:
        raise BundleError(
            f"{where}: layer_types is not one {FULL} in every {interval} layers; irregular "
            "patterns are not supported"
        )
    return interval


def _check_window(window: object, where: str) -> None:
    if type(window) is not int or window < 1:
        raise BundleError(
            f"{where}: sliding_window must be a positive integer, or null where layer_types has no "
            f"{SLIDING}, is {window!r:.40}"
        )


def _one_scope(
    nested: dict[str, Any], full: dict[str, Any], family: str, where: str
) -> dict[str, Any]:
    """The settings of rotary positions, which may be given by type of layer."""
    by_type = {key: value for key, value in nested.items() if isinstance(value, dict)}
    known = arguments_of(family)
    if by_type:
        _check_by_type(nested, by_type, full, where)
    if not by_type or "rope_parameters" in known:
        return {
            key: value
            for key, value in nested.items()
            if key not in by_type and not key.startswith("mrope_")  # of images
        }
    scope = dict(by_type.get(FULL) or next(iter(by_type.values())))
    plain = {"rope_type": "default", "rope_theta": scope.get("rope_theta")}
    alike = (scope, plain) if family in _SCALES_FULL_ALONE else (scope,)
    if LOCAL_BASE in known:
        full[LOCAL_BASE] = by_type.get(SLIDING, scope).get("rope_theta")
        alike = ({**plain, "rope_theta": full[LOCAL_BASE]},)
    if unlike := [key for key, value in by_type.items() if key != FULL and value not in alike]:
        raise BundleError(
            f"{where}: rope_parameters of {' and '.join(unlike)} differ from {FULL}'s, which is "
            "not supported for this architecture"
        )
    return scope


def _check_by_type(
    nested: dict[str, Any], by_type: dict[str, Any], full: dict[str, Any], where: str
) -> None:
    """Raise BundleError for settings of positions that transformers passes over by type of layer.

    Another of those, the length beside them, is deleted.
    """
    full.pop(ORIGINAL_LENGTH, None)
    wrong = [key for key, value in nested.items() if value and key not in by_type]
    wrong += [
        f"truncate = {scope['truncate']!r}"
        for scope in by_type.values()
        if not scope.get("truncate", True)
    ]
    if wrong:
        raise BundleError(
            f"{where}: rope_parameters has {', '.join(wrong)}, which transformers does not read "
            f"where they are given by type of layer; delete it, or put it into {FULL}"
        )
