"""Configurations of any model type of mlx-lm: completed by transformers, and flat.

transformers' own class fills in what a configuration leaves out, and knows each spelling of rotary
positions, of any year. What mlx-lm's class takes is then flat, under its own names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from export.sources.rope import ORIGINAL_LENGTH, checked_scaling, with_fixed_base
from export.sources.source import turned
from export.sources.windows import FULL, SLIDING, pattern_of
from runtime.adapters.origins import Origin
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
# what Ministral 3 has beside a scaling of positions: a scale of queries far from the start
_BESIDE_SCALING = ("llama_4_scaling_beta", "max_position_embeddings")
_BASES = ("rope_theta", "rotary_emb_base")
_TURNED = ("partial_rotary_factor", "rotary_pct")
LOCAL_BASE = "rope_local_base_freq"  # of layers with a window, which do not scale positions
_POSITIVE = re.compile("(eps|epsilon|^rope_theta|base_freq|attn_scalar)$")
_MAX_LAYERS = 1024
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
}
_UNBOUNDED = "time_step_limit"  # of state spaces
_FEW = 8  # columns of the arrays that stand for tensors where there are experts
_MOST_PARTS = 4096  # of which a tensor is joined: not if every other row is taken
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
# model types that mlx-lm has no class for, or one that leaves something out, or whose layers are
# given too much -> our module
OWN = {
    "gemma2": "export.sources.gemma2",
    "gemma4_text": "export.sources.gemma4",
    "opt": "export.sources.opt",
}
# transformers' names of tensors -> mlx-lm's, where its class has no `sanitize` that renames them
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("transformer.", ""),),
    "nanochat": (
        *(("model.embed_tokens.", "transformer.wte."), ("model.layers.", "transformer.h.")),
        *((f".self_attn.{one}_proj.", f".attn.c_{one}.") for one in "qkv"),
        *((".self_attn.o_proj.", ".attn.c_proj."), (".fc1.", ".c_fc."), (".fc2.", ".c_proj.")),
    ),
}
# parts of names of mlx-lm's tensors -> transformers', where these are others in every checkpoint
_ELSEWHERE = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), (("model.", "transformer."),)),
    "nanochat": tuple((ours, theirs) for theirs, ours in NAMES["nanochat"]),
    "gpt_neox": (
        *(("model.h.", "gpt_neox.layers."), ("model.embed_out", "embed_out")),
        ("model.", "gpt_neox."),
    ),
}
# parts of names that are one below the other in one of transformers' tensors, with its name
_JOINED = {
    "granitemoehybrid": (
        ((".mlp.gate_proj.", ".mlp.up_proj."), ".shared_mlp.input_linear."),
        ((".mlp.down_proj.",), ".shared_mlp.output_linear."),
    ),
}
_TRANSPOSED = ("gpt2",)  # whose matrices in layers are (in, out) in transformers
_NEEDED = inspect.Parameter.empty  # the default of an argument without one
# arguments that classes of mlx-lm need and transformers has no setting for -> what it computes
_ABSENT = {
    **{"rope_scaling": None, "sliding_window": None, "sliding_window_pattern": None},
    **{"attention_bias": False, "mlp_bias": False, "post_norm": False, "qk_norm": True},
}


def model_module(family: str, where: str = "config") -> ModuleType:
    """The module of mlx-lm with a family's class. Raises BundleError where there is none."""
    if not isinstance(family, str) or family not in module_names():
        raise BundleError(
            f"{where}: architecture {family!r:.40} is not supported: mlx-lm has no class for it"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # on which some say what they miss
            module = importlib.import_module(OWN.get(family, f"mlx_lm.models.{family}"))
    except (ImportError, SystemExit) as e:  # some end the process where a package is missing
        raise BundleError(
            f"{where}: mlx-lm cannot load architecture {family!r:.40}: a package that it needs is "
            f"missing ({e})"
        ) from e
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise BundleError(f"{where}: architecture {family!r:.40} is not supported: it is no model")
    return module


def model_classes(family: str, where: str = "config") -> tuple[Any, Any]:
    """mlx-lm's class of a family's language model, and that of its settings.

    Where a module wraps a text model of its own, they are the text model's.
    """
    module = model_module(family, where)
    wraps = "text_config" in inspect.signature(module.ModelArgs).parameters
    if wraps and hasattr(module, "TextModel") and hasattr(module, "TextModelArgs"):
        return module.TextModel, module.TextModelArgs
    return module.Model, module.ModelArgs


@cache
def module_names() -> tuple[str, ...]:
    """The names of all modules under mlx_lm.models, and of our own beside them."""
    (folder,) = importlib.import_module("mlx_lm.models").__path__
    return tuple(sorted({*(path.stem for path in Path(folder).glob("*.py")), *OWN}))


def arguments_of(family: str) -> set[str]:
    """The names of the settings that mlx-lm's class of a family takes."""
    return set(_parameters(family))


def is_own_default(family: str, key: str, value: Any) -> bool:
    """Whether a class of mlx-lm takes this value for a setting that is left out."""
    parameter = _parameters(family).get(key)
    # a comma too many in dots1's class makes a tuple of one
    return parameter is not None and parameter.default in (value, (value,))


@cache
def _parameters(family: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model_classes(family)[1]).parameters


def completed(raw: dict[str, Any]) -> dict[str, Any] | None:
    """A configuration with transformers' defaults; None where it has no class for its type.

    Raises ValueError for what that class refuses.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    said, kind = transformers.logging.get_verbosity(), settings_class(raw["model_type"])
    transformers.logging.set_verbosity_error()
    needed = {field.name for field in fields(kind) if "None" not in str(field.type)}
    stated = {key: value for key, value in raw.items() if value is not None or key not in needed}
    try:
        whole = kind.from_dict(_decoded(stated))
        made: dict[str, Any] = whole.to_dict()
    except (StrictDataclassError, LookupError) as e:
        raise ValueError(f"transformers refuses it: {e}") from e
    finally:
        transformers.logging.set_verbosity(said)
    return made


def _decoded(value: Any) -> Any:
    """A configuration's value, with numbers such as {"__float__": "Infinity"} as they are."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        for key in _LAYERS:  # before transformers lists them
            if type(value.get(key)) is int and value[key] > _MAX_LAYERS:
                raise ValueError(f"{key} must be from 1 to {_MAX_LAYERS}, is {value[key]}")
        return {key: _decoded(inner) for key, inner in value.items()}
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
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise BundleError(f"{where}: its text_config cannot be understood: {e}") from e


def text_family(outer: str, model_type: str | None) -> str:
    """The module of mlx-lm with the class of a text model of a type inside of an `outer` one.

    mlx-lm's class of the outer model says where it is, unless mlx-lm has one for the text's type.
    It is the outer one itself where that has a text model of its own.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    names = module_names()
    own = str(MODEL_REMAPPING.get(model_type, model_type))
    if outer not in names:
        return own if own in names else outer
    held = vars(model_module(outer)).values()
    imported = [
        value.__name__.rpartition(".")[2]
        for value in held
        if isinstance(value, ModuleType) and hasattr(value, "ModelArgs")
    ]
    taken = {value.__module__.rpartition(".")[2] for value in held if isinstance(value, type)}
    if not imported:
        return own if own in taken else outer
    return own if own in names else imported[0] if len(imported) == 1 else outer


def model_class(model_type: str) -> str | None:
    """The name of transformers' class of causal language models of a type, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name


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
    for key, value in raw.items():
        if not is_finite(value) and key != _UNBOUNDED:
            raise BundleError(f"{where}: {key} is {value!r:.80}, not a finite number")
    full = settings_of(raw, family, where)
    known = arguments_of(family)
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
    if type(layers) is not int or not 1 <= layers <= _MAX_LAYERS:
        raise BundleError(
            f"{where}: num_hidden_layers must be from 1 to {_MAX_LAYERS}, is {layers!r:.40}"
        )
    for key, value in full.items():
        if value is None and defaults.get(key) is None:
            continue
        if key in _SIZES and (type(value) is not int or value < 1):
            raise BundleError(f"{where}: {key} must be a positive integer, is {value!r:.40}")
        if _POSITIVE.search(key) and (type(value) not in (int, float) or value <= 0):
            raise BundleError(f"{where}: {key} must be a positive number, is {value!r:.40}")


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
    heads, found = config.get("num_attention_heads"), {}
    for name, parameter in _parameters(family).items():
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
            found[name] = value
    return found


def is_finite(value: Any) -> bool:
    """Whether a manifest can hold a value; limits of time steps may be infinite."""
    if isinstance(value, list | tuple | dict):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def flat(full: dict[str, Any], family: str, where: str) -> dict[str, Any]:
    """Settings with those of rotary positions under the names that mlx-lm's class has for them."""
    known = arguments_of(family)
    if full.get("layer_types"):
        full.pop("full_attn_idxs", None)  # of which transformers has made these
    if "global_head_dim" in known:
        full |= _of_gemma4(full, where)
    nested = full.get("rope_parameters") or {}
    scope = dict(full.get("rope_scaling") or {}) or _one_scope(nested, full, family, where)
    scope = with_fixed_base(scope, full)
    base_alone = {*nested} <= {"rope_theta", "rope_type"} and "rope_theta" in known
    by_type = any(isinstance(value, dict) for value in nested.values())
    nests = "rope_parameters" in known and not by_type  # those of each type of layer stay apart
    nests = nests and _parameters(family)["rope_parameters"].default is not None
    beside = {"rope_theta", "rope_scaling"} <= known and not by_type and not nests
    needed = "rope_parameters" in known and (
        _parameters(family)["rope_parameters"].default is _NEEDED
    )
    if "rope_parameters" not in known or ((base_alone or beside) and not needed):
        full.pop("rope_parameters", None)
    full.pop("rope_scaling", None)
    base = scope.pop("rope_theta", None) or full.get("rope_theta")
    turned = scope.pop("partial_rotary_factor", None) or full.get("partial_rotary_factor")
    for names, value in ((_BASES, base), (_TURNED, turned)):
        if value is not None:
            full[next((name for name in names if name in known), names[0])] = value
    if "rope_parameters" in known:  # a class that takes them whole
        scope = {key: value for key, value in scope.items() if key not in _BESIDE_SCALING}
    scaling = checked_scaling(scope, full, where)
    if scaling and scaling["rope_type"] == "longrope":  # Phi 3's class reads the older name
        scaling = {**scaling, "type": "longrope"}
    full["rope_scaling"] = scaling
    if "rope_parameters" in full and nests:
        _nest_positions(full)
    elif "rope_parameters" in full:  # where the class finds the same
        for key in {"rope_scaling", _BASES[0], _TURNED[0]} - known:
            full.pop(key, None)
    if words := _LAYER_NAMES.get(family):
        full["layer_types"] = [words.get(one, one) for one in full.get("layer_types") or []]
        full["position_embedding_type"] = full.get("position_embedding_type") or "nope"
    if SLIDING in (full.get("layer_types") or ()):
        _check_window(full.get("sliding_window"), where)
    full.pop("_sliding_window_pattern", None)  # transformers writes it beside what it reads
    if "layer_types" not in known and "sliding_window_pattern" in known and full.get("layer_types"):
        written = str(_parameters(family)["sliding_window_pattern"].annotation)
        types, letters = full.pop("layer_types"), "str" in written
        # beside layers with a window, those without have no positions
        has_none = letters and full.get("sliding_window") is None and {*types} == {FULL}
        full["sliding_window_pattern"] = None if has_none else pattern_of(types, letters, where)
    alternates = "layer_types" not in known and "full_attention_interval" in known
    if alternates and (types := full.pop("layer_types", None)):
        full["full_attention_interval"] = _interval_of(list(types), where)
    return full


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
            f"{where}: sliding_window must be a positive integer where layer_types has {SLIDING}, "
            f"is {window!r:.40}"
        )


def _one_scope(
    nested: dict[str, Any], full: dict[str, Any], family: str, where: str
) -> dict[str, Any]:
    """The settings of rotary positions, which may be given by type of layer."""
    by_type = {key: value for key, value in nested.items() if isinstance(value, dict)}
    known = arguments_of(family)
    if not by_type or "rope_parameters" in known:
        return {
            key: value
            for key, value in nested.items()
            if key not in by_type and not key.startswith("mrope_")  # of images
        }
    scope = dict(by_type.get(FULL) or next(iter(by_type.values())))
    full.pop(ORIGINAL_LENGTH, None)  # which transformers does not read beside these
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
    wrong = [key for key, value in nested.items() if value and key not in by_type]
    if not scope.get("truncate", True):
        wrong.append(f"truncate = {scope['truncate']!r}")
    if wrong:
        raise BundleError(
            f"{where}: rope_parameters has {', '.join(wrong)}, which transformers does not read "
            f"where they are given by type of layer; delete it, or put it into {FULL}"
        )
    return scope


@dataclass(frozen=True)
class Made:
    """A part of a tensor that mlx-lm makes: rows of a checkpoint's, or all of it transposed.

    columns: of these rows, the first column and how many there are; None for all.
    """

    source: str
    first: int
    rows: int
    transposed: bool = False
    columns: tuple[int, int] | None = None


def tensors_made(
    model: Any, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, list[Made]]:
    """The tensors that mlx-lm's `model` makes of a checkpoint's in `sanitize`, by their names.

    Each is parts of the checkpoint's, one below the other; those of (N, R, C) are N * R rows.
    `sanitize` is run on arrays that hold the numbers of their rows and columns, which take no
    memory; where experts are stacked, the arrays have few columns. Raises BundleError where it does
    anything else than to rename tensors, to split them, to join them by rows, to transpose them,
    and to leave some out.
    """
    import mlx.core as mx

    heights = [prod(shape[:-1]) if len(shape) > 1 else prod(shape) for shape in shapes.values()]
    if not hasattr(model, "sanitize"):
        return {name: [Made(name, 0, rows)] for name, rows in zip(shapes, heights, strict=True)}

    if any(type(module).__name__ == "SwitchLinear" for _, module in model.named_modules()):
        shapes = {
            name: (*shape[:-1], min(_FEW, shape[-1])) if len(shape) > 1 else shape
            for name, shape in shapes.items()
        }
    starts = dict(zip(shapes, accumulate(heights[:-1], initial=0), strict=True))

    def of_rows(name: str, shape: tuple[int, ...], rows: int) -> Any:
        numbers = mx.arange(rows) + starts[name]
        return mx.broadcast_to(
            numbers.reshape(shape if len(shape) < 2 else (*shape[:-1], 1)), shape
        )

    def of_columns(shape: tuple[int, ...]) -> Any:
        return mx.broadcast_to(mx.arange(shape[-1]), shape) if len(shape) > 1 else mx.zeros(shape)

    sized = zip(shapes.items(), heights, strict=True)
    rows_in = {name: of_rows(name, shape, rows) for (name, shape), rows in sized}
    columns_in = {name: of_columns(shape) for name, shape in shapes.items()}
    names = {id(array): name for name, array in rows_in.items()}
    rows_out, columns_out = (_sanitized(model, one, where) for one in (rows_in, columns_in))
    made: dict[str, list[Made]] = {}
    of_source = dict(zip(shapes, heights, strict=True))
    for name, array in rows_out.items():
        source = names.get(id(array))
        if source is not None:
            made[name] = [Made(source, 0, of_source[source])]
            continue
        made[name] = _parts_of(array, columns_out[name], shapes, starts)
        if not made[name]:
            raise BundleError(f"{where}: mlx-lm rearranges {name}, which is not supported")
    return made


def sanitized(model: Any, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the class's `sanitize` makes of tensors. Raises BundleError if it does not take them."""
    try:
        made: dict[str, Any] = model.sanitize(dict(tensors))
    except (LookupError, ValueError, TypeError, AttributeError) as e:
        of_mlx_lm = type(model).__module__.startswith("mlx_lm.")
        version = f" of mlx-lm {metadata.version('mlx-lm')}" if of_mlx_lm else ""
        found = f"asks for {e.args[0]}" if isinstance(e, KeyError) else f"says {e!r:.200}"
        raise BundleError(
            f"{where}: {type(model).__module__}.{type(model).__name__}{version} cannot read these "
            f"tensors: it {found}. A file of the checkpoint is missing or damaged, or it was saved "
            "in a form that this version does not know: download it again, or install another "
            "version of mlx-lm"
        ) from e
    return made


def _sanitized(model: Any, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same; Gemma 3's takes the head from the model, once."""
    head = model.get("lm_head")
    made = sanitized(model, tensors, where)
    if head is not None:
        model.lm_head = head
    return made


def whole_tensors(model: Any) -> dict[str, tuple[list[str], int | None]]:
    """The checkpoint's tensors of which layers of our own class have parts, by name.

    With the parts' names, and the axis along which they are parts; None where each is the whole.
    """
    found: dict[str, tuple[list[str], int | None]] = (
        model.whole() if hasattr(model, "whole") else {}
    )
    return found


def usual_origins(
    family: str, model: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Origin]]:
    """Where transformers has the tensors of a model, without those of the same name there.

    For sources that have no tensors of transformers, which would show it. `shapes` are those of all
    tensors of one of mlx-lm's models.
    """
    found = {}
    for name, shape in shapes.items():
        theirs = name
        for old, new in _ELSEWHERE.get(family, ()):
            theirs = theirs.replace(old, new)
        if theirs != name:
            transposed = family in _TRANSPOSED and len(shape) == 2 and ".h." in name
            found[name] = [Origin(theirs, 0, shape[0], shape[0], transposed)]
        for halves, joined in _JOINED.get(family, ()):
            for at, half in enumerate(halves):
                if half in name:
                    height = len(halves) * shape[0]
                    theirs = name.replace(half, joined)
                    found[name] = [Origin(theirs, at * shape[0], shape[0], height)]
    for name, (parts, axis) in whole_tensors(model).items():
        for at, part in enumerate(parts):
            (height, *across), count = shapes[part], len(parts)
            first, whole = (at * height, count * height) if axis == 0 else (0, height)
            columns = (at * across[0], across[0], count * across[0]) if axis else None
            found[part] = [Origin(name, first, height, whole, columns=columns)]
    return found


def shifts(model: Any, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, float]:
    """What `sanitize` adds to tensors of one axis, by name: Qwen 3.5's norms, to which it adds 1.

    Raises BundleError where it does not understand tensors of these shapes.
    """
    import mlx.core as mx

    if not hasattr(model, "sanitize"):
        return {}

    def made_of(value: float) -> dict[str, Any]:
        one = mx.array(value)
        return {name: mx.broadcast_to(one, shape) for name, shape in shapes.items()}

    from_zeros, from_ones = (_sanitized(model, made_of(value), where) for value in (0.0, 1.0))
    found = {}
    for name, array in from_zeros.items():
        if array.ndim == 1 and name in shapes:
            added, other = (float(one[0].item()) for one in (array, from_ones[name]))
            if other != added + 1:
                raise BundleError(f"{where}: mlx-lm multiplies {name}, which is not supported")
            if added:
                found[name] = added
    return found


def _parts_of(
    rows: Any, columns: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The parts of tensors of which an array of numbers consists; none if it is not made so."""
    if rows.ndim not in (2, 3):
        return []
    if rows.ndim == 3 and (filters := _filters(rows, shapes, starts)):
        return filters
    # of all matrices that are stacked, the first row
    numbers, across = np.array(rows[..., 0]).reshape(-1), np.array(columns[..., 0, :]).reshape(-1)
    if rows.ndim == 2 and rows[0, 0].item() != rows[0, -1].item():
        return _transposed(rows, columns, shapes, starts)
    width, sources = rows.shape[-1], [*starts]
    owners = np.searchsorted([*starts.values()], numbers, side="right") - 1
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(owners) != 0)) + 1
    left = int(across[0])
    if len(breaks) >= _MOST_PARTS or not (across.reshape(-1, width) - left == range(width)).all():
        return []
    parts = []
    for first, last in pairwise([0, *breaks.tolist(), len(numbers)]):
        source = sources[owners[first]]
        shape = shapes[source]
        chosen = None if shape[-1] == width else (left, width)
        if len(shape) not in (2, 3) or (chosen and len(shape) != 2) or (left and not chosen):
            return []
        rows_of = int(numbers[first]) - starts[source], last - first
        parts.append(Made(source, *rows_of, columns=chosen))
    return parts


def _filters(
    rows: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The filters whose numbers these are; their last two axes may change places if one is 1."""
    source = next((n for n in starts if starts[n] == int(rows[0, 0, 0].item())), "")
    numbers = np.array(rows.reshape(rows.shape[0], -1))
    alike = turned(shapes.get(source, ())) == rows.shape and 1 in rows.shape[1:]
    in_order = (numbers == starts.get(source, 0) + np.arange(len(numbers))[:, None]).all()
    return [Made(source, 0, len(numbers))] if alike and in_order else []


def _transposed(
    rows: Any, columns: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The whole matrix whose numbers these are, transposed; none if there is no such matrix."""
    numbers, across = np.array(rows[0]), np.array(columns[:, 0])
    source = max((name for name in starts if starts[name] <= numbers[0]), key=starts.__getitem__)
    same = shapes[source] == (len(numbers), len(across))
    in_order = np.array_equal(numbers, starts[source] + np.arange(len(numbers)))
    if not (same and in_order and np.array_equal(across, np.arange(len(across)))):
        return []
    return [Made(source, 0, len(across), transposed=True)]


# dropout, numbers of tokens, how training began, blocks that are refused where there are any, what
# LFM2 repeats, and GPT-2's other heads; Qwen 3.5 always has its gate
_NEUTRAL = re.compile(
    "drop|_token_id$|_token_index$|_token_ids$|_init_scale$|^mamba_|^router_|^block_norm_eps$"
    "|^attn_output_gate$|^summary_"
)


def is_neutral_name(key: str) -> bool:
    """Whether a setting of any type, by its name, does not change what a model computes."""
    return bool(_NEUTRAL.search(key))
