"""Which settings of a config.json are used, or compute nothing; others are said or refused."""

from __future__ import annotations

import re
from typing import Any

from export.sources.families import text_config
from export.sources.general import arguments_of, completed, is_neutral_name
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
# words in the names of settings that change what a model computes, as in Granite's and Cohere's
_COMPUTES = re.compile(
    "scal|multipl|softcap|rope|rotary|window|norm|bias|act|expert|clip|alibi|residual|attn|attention"
)


def used_settings(family: str, model_type: str | None = None) -> set[str]:
    """The settings that a family's model is computed with.

    Those are what mlx-lm's class takes, and transformers' class, whose values `export.cut.unread`
    checks.
    """
    theirs = completed({"model_type": model_type or family}) or {}
    return {*_USED.split(), *arguments_of(family), *theirs, IN_CONFIG}


def neutral_settings() -> set[str]:
    """The settings that do not change what a model computes."""
    return {*" ".join(_NEUTRAL.values()).split()}


def neutral_in_wrapper() -> set[str]:
    """The settings around a text_config that do not change what the text model computes."""
    return {*" ".join(_WRAPPER_NEUTRAL.values()).split()} | neutral_settings()


def unknown_settings(family: str, raw: dict[str, Any], where: str) -> list[str]:
    """The settings in no list, for a warning; those without a value say nothing.

    Args:
        family: of the model.
        raw: the content of config.json.
        where: the file, for messages.

    Raises BundleError for one that, by its name, changes what the model computes.
    """
    text = text_config(raw, where)
    model_type = str(text.get("model_type", raw["model_type"]))
    known = used_settings(family, model_type) | neutral_settings()
    unknown = _others(text, known)
    unknown = {key: value for key, value in unknown.items() if not is_neutral_name(key)}
    if model_type != raw["model_type"]:
        around = {*WRAPPER_USED, *neutral_in_wrapper(), IN_CONFIG}
        if raw["model_type"] != "gemma3":  # whose settings are listed here
            around |= (completed({"model_type": raw["model_type"]}) or {}).keys()
        if "text_config" not in raw:  # in earlier years the text's settings stood beside them
            around |= known | text.keys()
        unknown |= _others(raw, around)
    if computing := [key for key in unknown if _COMPUTES.search(key)]:
        raise BundleError(
            f"{where}: {', '.join(f'{key} = {unknown[key]!r:.60}' for key in computing)} is not "
            f"supported for {family}; if the original model computes without it, delete it there"
        )
    return sorted(unknown)


def _others(config: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The settings that are not known and have a value."""
    return {
        key: value
        for key, value in config.items()
        if key not in known and value not in (None, False, {}, [])
    }
