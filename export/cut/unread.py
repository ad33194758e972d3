"""Settings that a model class does not read: found by changing each and tracing the model again.

mlx-lm's classes compute their architecture as it is by default, and pass over some settings in
silence: its Llama sees all tokens, whatever its `sliding_window`. Such a setting is refused by
name, unless it is off, or transformers' default. Windows, and parts of heads that are turned, are
refused even so: classes were found that pass over them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from export.cut.stand_ins import Replacement, replaced
from export.cut.tape import Tape
from export.cut.taps import Taps
from export.cut.trace import trace
from export.sources.families import OF_MLX_LM, build_model
from export.sources.general import (
    ACTIVATION,
    EXPERTS,
    LOCAL_BASE,
    default_settings,
    known_name,
    settings_of,
)
from export.sources.model_classes import arguments_of, is_own_default
from export.sources.settings import is_neutral_name, neutral_settings, used_settings
from export.sources.windows import is_wide
from runtime.adapters.fused import IN_CONFIG
from runtime.core.errors import BundleError

_PROBLEMS = (
    *(BundleError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
    *(TypeError, ValueError),
)
PROBE = 17  # tokens: more than the windows that are tried
_PATTERN = "_sliding_window_pattern"  # transformers writes it, but reads the other
# sizes of tensors, which the checkpoint's own shapes and names confirm, and the lengths
_SIZES = {
    *("model_type", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings"),
    *("n_positions", "n_ctx", "n_inner", "num_key_value_heads"),
    # which layers have experts
    *("mlp_layer_types", "moe_layer_end_index"),
    *("original_max_position_embeddings", "quantization", "quantization_config", IN_CONFIG),
    *("block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_auto_adjust_ff_dim"),
    *("conv_L_cache", "linear_conv_kernel_dim"),
}
# of two GELUs the other one, with which any class computes; of other activations none of these
_OTHERS = {
    **{"relu": "silu", "gelu": "gelu_pytorch_tanh", "rope": "nope"},
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu"),
}
# settings that mlx-lm's classes read otherwise than transformers, which has some in its base of all
# types, to the values with which both compute the same
_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "per_layer_config": (None, {}),
    "rope_traditional": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),  # to and from images alone
}
_OF_FAMILY = {"gpt_bigcode": {"multi_query": (None, True)}}  # the order of queries, keys and values
# the number by which each type of rotary positions scales most
_SCALES_BY = {**dict.fromkeys(("linear", "llama3", "yarn"), "factor"), "longrope": "short_factor"}
_WINDOWS = re.compile("window|layer_types")  # settings that transformers' class has to know
_SAYS_WHERE = {"use_sliding_window", "layer_types", _PATTERN[1:]}  # which layers have one
# rules for layers -> the list of layers that transformers makes of them, where it is not given
_RULES = {
    "no_rope_layer_interval": "no_rope_layers",
    "global_attn_every_n_layers": "layer_types",
}
_CHANGES_LAYERS = re.compile("rotary|model_base")  # for which defaults have been passed over
_NORMS_WEIGHTS = {"norm_topk_prob", "route_norm"}  # of a token's experts


def refuse_unread(
    family: str,
    config: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    lengths: Sequence[int] = (),
) -> None:
    """Raise BundleError for settings that mlx-lm's class does not read and that are not off.

    Args:
        family, config: what the model is built from.
        given: the original configuration.
        where: the checkpoint, for messages.
        lengths: of the longest sequences; a window that is as wide is off.
    """
    if refused := unread(family, config, given, where, lengths):
        said = ", ".join(f"{key} = {value!r:.60}" for key, value in refused.items())
        raise BundleError(
            f"{where}: {said}: mlx-lm's {family} does not compute with it; if the original model "
            "computes without it, delete it there" + _way_out(refused, given, lengths)
        )


def unread(
    family: str,
    config: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """The settings that `refuse_unread` refuses, with their values."""
    model_type = given.get("model_type")
    if model_type is None:
        return {}
    defaults = default_settings(model_type, family)
    settings = settings_of(dict(given), family, where)
    known, unused = arguments_of(family), given.keys() - used_settings(family, model_type)
    longest = max((settings.get("max_position_embeddings") or 0, *lengths))
    heeded = _heeded(settings, defaults or {})
    before: dict[bool, str] = {}
    alike = _OTHERWISE | _OF_FAMILY.get(family, {})
    refused = {
        key: settings[key]
        for key in alike
        if not _is_alike(family, key, settings.get(key), alike[key])
    }
    experts = any(map(settings.get, EXPERTS))
    takes_one = experts and settings.get("num_experts_per_tok") == 1
    if takes_one and not _norms_one(family, config, settings):
        refused["num_experts_per_tok"] = 1
    for key, value in settings.items():
        if "softcap" in key and value is None and (defaults or {}).get(key) is not None:
            refused[key] = value  # classes cap with their own number, then
        has_default = bool((defaults or {}).get(key)) and "window" not in key
        is_turned_off = has_default and value is not None and not value
        where_off = settings if key in _SAYS_WHERE else heeded
        is_off = _is_off(key, value, where_off, longest) and not is_turned_off
        if key in unused or key in alike or _is_neutral(key) or is_off:
            continue
        if key == "num_experts_per_tok" and not experts:
            continue
        if key == _PATTERN and (given.get("layer_types") or value == settings.get(_PATTERN[1:])):
            continue
        is_window = _WINDOWS.search(key)
        changes_layers = is_window or _CHANGES_LAYERS.search(key)
        is_default = defaults is not None and defaults.get(key) == value
        if is_default and not changes_layers:
            continue
        own = known_name(key, known)
        is_known = own in known or key in config
        if is_known and not (is_window and defaults is not None and key not in defaults):
            narrow = key in _SAYS_WHERE and is_wide(config.get("sliding_window"), PROBE)
            probed = {**config, "sliding_window": 3} if narrow else config
            if narrow not in before:
                before[narrow] = _checked(family, probed, where)
            others = _other_positions(config.get(own), settings.get("layer_types") or ())
            changes = [{own: other} for other in others or [another_value(key, value)]]
            nested = config.get("rope_parameters") or {}
            if own in nested:  # the class reads one of both
                changes[0]["rope_parameters"] = {**nested, **changes[0]}
            if all(_traced(family, {**probed, **change}) != before[narrow] for change in changes):
                continue
            if defaults is None and key in ACTIVATION:
                with replaced(_without(str(value))):
                    if _traced(family, config) != before[narrow]:
                        continue
        is_own = defaults is not None and key not in defaults
        is_own = is_own and (not changes_layers or key in OF_MLX_LM.get(family, ()))
        if is_own and is_own_default(family, own, value):
            continue  # transformers has no setting for it
        refused[key] = value
    return refused


def _is_alike(family: str, key: str, value: Any, alike: Sequence[Any]) -> bool:
    """Whether a class computes with a value as transformers does; what is on there stays on."""
    if value is False and is_own_default(family, key, True):
        return False
    return value in alike or is_own_default(family, key, value)


def _without(activation: str) -> list[Replacement]:
    """Another function in place of MLX's of this name, if it has one."""
    other = nn.silu if activation == "relu" else nn.relu
    return [(nn, activation, other)] if callable(getattr(nn, activation, None)) else []


def _norms_one(family: str, config: dict[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether weights of experts are normed, if at all, where a token has one expert too.

    transformers does so; several of mlx-lm's classes leave a single weight as it is.
    """
    named = _NORMS_WEIGHTS & arguments_of(family)
    on, off = ({**config, **dict.fromkeys(named, value)} for value in (True, False))
    wanted = any(settings.get(key, True) for key in named)
    return not wanted or _traced(family, on) != _traced(family, off)


def _heeded(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, but for those on windows that transformers passes over, as of Mistral's."""
    ignored = _SAYS_WHERE - defaults.keys() if "sliding_window" in defaults else set()
    return {key: value for key, value in settings.items() if key not in ignored}


def _is_neutral(key: str) -> bool:
    """Whether a setting computes nothing, or is the size of a tensor, which its shape confirms."""
    if key in _SIZES or key in neutral_settings() or is_neutral_name(key):
        return True
    sizes = ("_size", "_head_dim", "_size_per_layer_input")
    return key.endswith(sizes) and not re.search("window|chunk", key)


def _way_out(refused: Mapping[str, Any], given: Mapping[str, Any], lengths: Sequence[int]) -> str:
    if not any("window" in key for key in refused):
        return ""
    longest = given.get("max_position_embeddings")
    beyond = f" and --seq-lens (now {max(lengths)})" if lengths else ""
    return (
        "; or, to train on sequences within the window, set max_position_embeddings (now "
        f"{longest}){beyond} to at most its width"
    )


def _is_off(key: str, value: Any, settings: Mapping[str, Any], longest: int) -> bool:
    """Whether a setting says that something is not done to sequences of at most so many tokens."""
    if value in (None, False, 0, {}, []):
        return True
    types = settings.get("layer_types")
    full = isinstance(types, list) and {*types} == {"full_attention"}
    full = full or settings.get(_PATTERN[1:]) == 1
    wide = is_wide(settings.get("sliding_window"), longest)
    if key == "layer_types":
        alike = isinstance(types, list) and {*types} <= {"full_attention", "sliding_attention"}
        return full or (alike and wide)
    if key == LOCAL_BASE:
        return full
    if key in _RULES:
        return bool(settings.get(_RULES[key]))
    if key == "use_double_wide_mlp":  # Gemma 4's, of layers with the keys and values of others
        return not settings.get("num_kv_shared_layers")
    if key == "rope_theta":
        return settings.get("position_embedding_type") == "nope"
    if key == "partial_rotary_factor":
        dims = settings.get("head_dim") or 0
        return bool(value == 1 or value * dims == settings.get("rotary_dim"))
    heads = settings.get("num_attention_heads", 0)
    if key == "head_dim":  # of latent attention it is that of the part with positions
        turned = settings.get("qk_rope_head_dim")
        return bool(value * heads == settings.get("hidden_size") or value == turned)
    if "window" in key:
        off = settings.get("use_sliding_window") is False
        return full or off or wide or is_wide(value, longest)
    return False


def another_value(key: str, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):  # MLX keeps the logarithm of a base, which 1 more does not change
        return 3 + (value == 3) if "window" in key else value + max(1, value // 4)
    if isinstance(value, float):
        return 1.25 * value + 0.125
    if isinstance(value, str):
        return _OTHERS.get(value, "relu")
    if isinstance(value, list | tuple):
        return [_other(item) for item in value]
    return None


def _other_positions(value: Any, kinds: Collection[str]) -> list[dict[str, Any]]:
    """Settings of rotary positions, each with another number; those of layers in `kinds` alone."""
    if not isinstance(value, dict):
        return []
    scopes = {key: scope for key, scope in value.items() if isinstance(scope, dict)}
    if scopes:
        return [
            {**value, key: other}
            for key, scope in scopes.items()
            if key in kinds
            for other in (
                *_other_positions(scope, ()),
                {**scope, "rope_theta": 2 * scope.get("rope_theta", 1e4)},
            )
        ]
    name = _SCALES_BY.get(str(value.get("rope_type") or value.get("type")))
    number = value.get(name) if name else None
    if name is None or number in (None, 1):
        return []
    doubled = [2 * factor for factor in number] if isinstance(number, list) else 2 * number
    return [{**value, name: doubled}]


def _other(value: Any) -> Any:
    swapped = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    if isinstance(value, str):
        return swapped.get(value, f"no {value}")
    return 1 - value if value in (0, 1) else value


def _traced(family: str, config: dict[str, Any]) -> str:
    """Equal for models that compute the same; what is wrong with one that cannot run."""
    try:
        return _signature(family, config)
    except _PROBLEMS as problem:
        return f"{type(problem).__name__}: {problem}"


def _checked(family: str, config: dict[str, Any], where: str) -> str:
    """The same of a model that must run."""
    try:
        return _signature(family, config)
    except _PROBLEMS as problem:
        raise BundleError(
            f"{where}: {family} cannot be run with this configuration: {problem}"
        ) from problem


def _signature(family: str, config: dict[str, Any]) -> str:
    model = build_model(family, config)
    model.update(tree_map(mx.zeros_like, model.parameters()))  # random ones differ each time
    taps = Taps(model, PROBE, config, cuts=False)
    recorded: list[Any] = []

    def run(x: mx.array) -> list[mx.array]:
        with taps.recording(Tape()) as tape:
            logits = taps.model(mx.zeros((1, PROBE), dtype=mx.int32))
        recorded.clear()
        recorded.extend(
            (
                call.name,
                getattr(call, "scale", None),
                getattr(call, "cap", None),
                getattr(call, "bias", None),
                call.output.shape,
            )
            for call in tape.calls
        )
        masks = [mask for mask in tape.masks if isinstance(mask, mx.array)]
        # in order: with as many windows, other layers may have them
        recorded.append([isinstance(mask, mx.array) or mask for mask in tape.masks])
        inputs = [array for call in tape.calls for array in call.inputs]
        return [x, *inputs, logits, *masks]

    traced = trace(run, [mx.zeros((1,))])
    return f"{traced.signature} {recorded}"
