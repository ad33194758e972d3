"""Which settings of a config.json are used, or compute nothing; others are said or refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from export.sources.families import text_config
from export.sources.general import ACTIVATION, EXPERTS, completed, settings_class
from export.sources.model_classes import arguments_of, model_class
from export.sources.windows import is_wide
from runtime.adapters.fused import IN_CONFIG
from runtime.core.errors import BundleError

# of any type
_USED = """
model_type hidden_size num_hidden_layers intermediate_size rms_norm_eps num_attention_heads
num_key_value_heads head_dim vocab_size max_position_embeddings tie_word_embeddings rope_theta
rope_scaling rope_parameters quantization quantization_config
"""
# why they do not change what the model computes: the settings
_NEUTRAL = {
    "names and versions": """
        _name_or_path architectures auto_map transformers_version is_llama_config
        transformers.js_config unsloth_fixed unsloth_version tokenizer_class
    """,
    "the tensors have their own type": "dtype torch_dtype",
    "the tokenizer's, and of generation": """
        bos_token_id eos_token_id pad_token_id use_cache cache_implementation
    """,
    "of pretraining": "attention_dropout initializer_range",
    "of generation, in configurations of earlier years": """
        max_length min_length temperature top_k top_p typical_p num_beams num_beam_groups
        num_return_sequences length_penalty repetition_penalty no_repeat_ngram_size
    """,
    "what a call returns": "output_attentions output_hidden_states return_dict use_return_dict",
    "of classifiers": "id2label label2id problem_type task_specific_params",
    "these families are decoders": "is_encoder_decoder",
    "slices with the same result": "chunk_size_feed_forward pretraining_tp",
    "softmax is always computed in float32": """
        attention_softmax_in_fp32 scale_attention_softmax_in_fp32
    """,
}
# of a model with a vision tower, around its text_config: what is used, and why others are not
WRAPPER_USED = frozenset(
    (
        *("model_type", "text_config", "vocab_size", "tie_word_embeddings"),
        *("quantization", "quantization_config"),
    )
)
_WRAPPER_NEUTRAL = {
    "the text model alone is read": """
        vision_config mm_tokens_per_image projector_hidden_act boi_token_index eoi_token_index
        image_token_index boi_token_id eoi_token_id image_token_id ignore_index
    """,
}
# settings of the programs that models were made with, to the values with which they change nothing
_AS_USUAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("full_attn_mod", "interpolate_factor", "rotary_pct"), (1,)),
    **dict.fromkeys(("num_expert_groups", "num_limited_groups"), (1,)),
    **dict.fromkeys(("rotary", "use_rotary_pos_emb", "use_rmsnorm"), (True,)),
    **dict.fromkeys(("scale_attn_weights", "use_gated_activation"), (True,)),
    # each needs other tensors
    **{"normalization_function": ("rmsnorm",), "norm_type": ("rms", "layer_norm")},
}
# factors that change nothing where they are 1
_FACTOR = re.compile("(scaling|factor|embedding_multiplier|residual_multiplier|logits?_scale)$")
# settings that are on where a model has tensors of these names
_HAS_TENSORS = {
    re.compile("^(use_)?qk_(layer)?norm$"): re.compile(r"\.(q|k|query|key)_(layer)?norm\."),
    re.compile("^(use_)?(attention|attn|qkv)_bias$"): re.compile(r"(q|k|v|qkv)(_proj)?\.bias$"),
}
# names of the same setting: where transformers reads one that is given, the others are not used
_SAME = (
    (*ACTIVATION, "activation"),
    ("norm_eps", "layer_norm_eps", "rms_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"),
    ("layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
    ("head_dim", "attention_head_dim"),
    ("num_experts_per_tok", "experts_per_token"),
)
# words in the names of settings that change what a model computes, as in Granite's and Cohere's
_COMPUTES = re.compile(
    "scal|factor|multipl|softcap|rope|rotary|window|norm|bias|(^|_)act(ivation)?(_|$)|expert|clip"
    "|alibi|residual|attn|attention"
)

# dropout, numbers of tokens, how training began, blocks that are refused where there are any, what
# LFM2 repeats, and GPT-2's other heads; Qwen 3.5 always has its gate; which code computes the same,
# and a tower
_NEUTRAL_NAME = re.compile(
    "drop|_token_id$|_token_index$|_token_ids$|_init_scale$|^initializer_|^mamba_|^router_|^block_norm_eps$"
    "|^attn_output_gate$|^summary_|attn_implementation|flash_att|^(use_)?fused?_|checkpointing"
    "|^vit_|^pixel_"
)
# settings of experts, where a model has one at most
_OF_EXPERTS = re.compile("expert|^moe_|topk")


def used_settings(family: str, model_type: str | None = None) -> set[str]:
    """The settings that a family's model is computed with.

    Those are what mlx-lm's class takes, and transformers' class, whose values `export.cut.unread`
    checks. Where it has none, activations are checked.
    """
    kind = model_type or family
    theirs = completed({"model_type": kind})
    if theirs is None:
        return {*_USED.split(), *arguments_of(family), *ACTIVATION, IN_CONFIG}
    others = {*settings_class(kind).attribute_map}
    # of what stands in there, transformers reads this outside, too, and the base
    others |= {"partial_rotary_factor"} & (theirs.get("rope_parameters") or {}).keys()
    return {*_USED.split(), *arguments_of(family), *theirs, *others, IN_CONFIG}


def neutral_settings() -> set[str]:
    """The settings that do not change what a model computes."""
    return {*" ".join(_NEUTRAL.values()).split()}


def is_neutral_name(key: str) -> bool:
    """Whether a setting of any type, by its name, does not change what a model computes."""
    return bool(_NEUTRAL_NAME.search(key))


def neutral_in_wrapper() -> set[str]:
    """The settings around a text_config that do not change what the text model computes."""
    return {*" ".join(_WRAPPER_NEUTRAL.values()).split()} | neutral_settings()


def unknown_settings(
    family: str, raw: dict[str, Any], where: str, tensors: Collection[str] = ()
) -> list[str]:
    """The settings in no list, for a warning; those without a value say nothing.

    Args:
        family: of the model.
        raw: the content of config.json.
        where: the file, for messages.
        tensors: the names of the model's, which confirm some settings.

    Raises BundleError for one that, by its name, changes what the model computes.
    """
    text = text_config(raw, where)
    model_type = str(text.get("model_type", raw["model_type"]))
    known = used_settings(family, model_type) | neutral_settings()
    unknown = _others(text, known)
    if model_type != raw["model_type"]:
        around = {*WRAPPER_USED, *neutral_in_wrapper(), IN_CONFIG}
        if raw["model_type"] != "gemma3":  # whose settings are listed here
            around |= (completed({"model_type": raw["model_type"]}) or {}).keys()
        if "text_config" not in raw:  # in earlier years the text's settings stood beside them
            around |= known | text.keys()
        unknown |= _others(raw, around)
    positions = text.get("rope_parameters")  # where transformers 5 writes some of them
    given = {**positions, **text} if isinstance(positions, dict) else text
    stated = {
        name: [given[same] for same in names if same in known and same in given]
        for names in _SAME
        for name in names
    }
    off = [key[4:] for key, value in text.items() if key.startswith("use_") and value is False]
    of_those = tuple(f"{key}_" for key in off)  # as cla_share_factor beside use_cla
    window, longest = text.get("sliding_window"), text.get("max_position_embeddings")
    has_none = "sliding_window" in off or window is None or is_wide(window, longest)
    of_window = ("sliding_window", "max_window_layers") if has_none else ()
    counts = [text[key] for key in EXPERTS if key in text]
    is_dense = bool(counts) and all(count in (None, 0, 1) for count in counts)
    for key in [*unknown]:
        value = unknown[key]
        usual = value in (*_AS_USUAL.get(key, ()), *stated.get(key, ()))
        usual = usual or (value == 1 and value is not True and bool(_FACTOR.search(key)))
        usual = usual or (value is True and _is_shown(key, tensors))
        of_experts = is_dense and _OF_EXPERTS.search(key)
        is_off = key in of_window or key.startswith(of_those) or of_experts
        if usual or is_off or is_neutral_name(key):
            del unknown[key]
    if computing := [key for key in unknown if _COMPUTES.search(key) and not stated.get(key)]:
        raise BundleError(
            f"{where}: {', '.join(f'{key} = {unknown[key]!r:.60}' for key in computing)} is not "
            f"supported for {family}; if the original model computes without it, delete it there"
        )
    return sorted(unknown)


def _is_shown(key: str, tensors: Collection[str]) -> bool:
    """Whether a setting is one that tensors show to be on."""
    names = [name for setting, name in _HAS_TENSORS.items() if setting.search(key)]
    return any(name.search(tensor) for name in names for tensor in tensors)


def own_code(raw: dict[str, Any], where: str) -> list[str]:
    """A warning of the code that a checkpoint brings for its model, which is never run.

    Raises BundleError where that is another class than transformers has for the type, by its name,
    or is for mlx-lm, which would run it in place of its own.
    """
    model_type, classes = raw["model_type"], raw.get("auto_map")
    named = (
        {key: _first(value) for key, value in classes.items()} if isinstance(classes, dict) else {}
    )
    code = named.get("AutoModelForCausalLM")
    further = [value for key, value in named.items() if key.startswith("AutoModel") and value]
    own = model_class(model_type)
    name, *same = (
        re.sub(r"forcausallm$|\W|_", "", str(text).rpartition(".")[2].lower())
        for text in (code, own, model_type)
    )
    warnings = []
    for key, given, others in (
        ("auto_map", code or next(iter(further), None), code and own and name not in same),
        ("model_file", raw.get("model_file"), True),
    ):
        if not given:
            continue
        said = f"{where}: {key} = {given!r:.80} is code of the checkpoint's own, which is never run"
        if others:
            raise BundleError(
                f"{said}: the model may be another than {own or model_type}; if that computes the "
                f"same, delete {key} there"
            )
        warnings.append(f"{said}: mlx-lm's class of {model_type} computes the model")
    return warnings


def _first(value: Any) -> Any:
    """A class of `auto_map`, of which a list may have two."""
    return next(iter(value), None) if isinstance(value, list) else value


def _others(config: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The settings that are not known and have a value."""
    return {
        key: value
        for key, value in config.items()
        if key not in known and value not in (None, False, {}, [])
    }
