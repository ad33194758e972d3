"""Which metadata of a GGUF file is used, which computes nothing, and which is refused.

Names are those of llama.cpp's loader and of the gguf library; ARCH stands for the architecture,
and * for a number or a name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Set
from typing import Any

import numpy as np

from export.sources.gguf_entries import BY_SIGMOID, OF_SCALING, entries_of
from export.sources.gguf_names import AS_METADATA
from runtime.adapters.fused import IN_GGUF
from runtime.core.errors import BundleError

_Neutral = tuple[object, ...]


def _names(lines: str) -> frozenset[str]:
    """The names in lines of PREFIX: WORD WORD."""
    parts = (line.strip().split(": ") for line in lines.strip().splitlines())
    return frozenset(f"{prefix}.{word}" for prefix, words in parts for word in words.split())


USED = {IN_GGUF} | _names(
    """
    general: architecture name alignment
    split: count
    ARCH: context_length embedding_length block_count feed_forward_length
    ARCH: nextn_predict_layers
    ARCH.attention: head_count head_count_kv key_length value_length key_length_swa
    ARCH.attention: value_length_swa layer_norm_rms_epsilon sliding_window sliding_window_pattern
    ARCH.rope: dimension_count dimension_count_swa freq_base freq_base_swa scale_linear
    ARCH.rope.scaling: type factor original_context_length finetuned attn_factor
    tokenizer.ggml: model pre tokens token_type scores merges bos_token_id eos_token_id
    tokenizer.ggml: unknown_token_id padding_token_id eot_token_id eom_token_id add_bos_token
    tokenizer.ggml: add_eos_token add_space_prefix
    tokenizer: chat_template chat_template.* chat_templates
    """
)
# why it computes nothing: the entries
_NEUTRAL = {
    "who made the file, of what, and how": """
        general: author version organization finetune basename description quantized_by size_label
        general: license license.name license.link url doi uuid repo_url source.* base_model.*
        general: dataset.* tags languages file_type
        quantize.imatrix: file dataset entries_count chunks_count
        imatrix: *
    """,
    "each tensor has its own type and shape": "ARCH: vocab_size",
    "the file is whole": "split: no tensors.count",
    "of generation": """
        general.sampling: *
        tokenizer.ggml: fim_pre_token_id fim_suf_token_id fim_mid_token_id fim_pad_token_id
        tokenizer.ggml: fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id
        tokenizer.ggml: middle_token_id suppress_tokens
    """,
    "of encoders and classifiers": """
        ARCH: pooling_type classifier.output_labels classifier.pooling_type decoder_start_token_id
        tokenizer.ggml: token_type_count seperator_token_id cls_token_id mask_token_id
    """,
    "of norms that these models do not have": """
        ARCH.attention: layer_norm_epsilon group_norm_epsilon group_norm_groups
    """,
    "a copy of the vocabulary": "tokenizer: huggingface.json",
}
NEUTRAL = _names("\n".join(lines.strip() for lines in _NEUTRAL.values()))

# entries that may be computed with: the values that change nothing; the first name that fits counts
_VALUES: dict[_Neutral, str] = {
    ("model",): "general: type",
    (2,): "general: quantization_version",
    ("reference", "Meta AI original pth"): "ARCH: tensor_data_layout",
    (0, 1): """
        ARCH: logit_scale residual_scale embedding_scale expert_weights_scale expert_gating_func
        ARCH: expert_group_count expert_group_used_count
        ARCH.attention: output_scale value_scale
    """,
    (1,): """
        ARCH.attention: causal
        ARCH.rope.scaling: yarn_attn_factor yarn_beta_slow
    """,
    (-1, 1): "ARCH.rope.scaling: yarn_ext_factor",
    (32,): "ARCH.rope.scaling: yarn_beta_fast",
    (0,): """
        tokenizer.ggml: add_sep_token remove_extra_whitespaces precompiled_charsmap
        tokenizer.ggml: normalizer.lowercase normalizer.strip_accents
        tokenizer: rwkv.world
        xielu: *
        diffusion: *
        clip: *
        adapter: *
        ARCH: *
    """,
}
# of architectures whose positions have several axes, which for text are the same, and of what sees
_OF_IMAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen35", "qwen2vl"), ("rope.dimension_sections",)),
    "qwen3vl": ("rope.dimension_sections", "n_deepstack_layers"),
}
FIXED = {name: values for values, names in _VALUES.items() for name in sorted(_names(names))}


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# the types of entries, by how their names end; the first that fits counts
_TYPES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (r"\.(architecture|name|type|model|pre|chat_template(\..+)?)", "a text", _is(str)),
    ("tokens|merges|chat_templates|fused", "a list of texts", _is(list)),
    ("token_type|scores", "a list of numbers", _is(np.ndarray)),
    (r"finetuned|_norm|residual|add_\w+", "true or false", _is(bool)),
    (
        r"epsilon|freq_base(_swa)?|factor|scale(_linear)?|softcapping|multiplier",
        "a finite number of at least 0",
        lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    ),
    (
        "",
        "an integer from 0 to 2^32 - 1",
        lambda value: type(value) is int and 0 <= value < 1 << 32,
    ),
)
# entries that may have a value for each layer, or for each axis of positions; windows are flags
_LISTED = re.compile("(head_count(_kv)?|feed_forward_length|_window_pattern|_sections)$")


def _pattern(names: Set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name).replace(r"\*", ".+") for name in names))


_USED, _NEUTRAL_ENTRIES = _pattern(USED), _pattern(NEUTRAL)
_FIXED = {name: _pattern(frozenset({name})) for name in FIXED}


def unknown_metadata(metadata: dict[str, Any], family: str, where: str) -> list[str]:
    """The entries in no list, for a warning.

    Args:
        metadata: of the file, by key.
        family: of its model.
        where: the file, for messages.

    Raises BundleError for an entry that would have to be computed, and is not, and for one of
    another type than its name's.
    """
    arch = str(metadata["general.architecture"])
    of_family = (*entries_of(family), *OF_SCALING.get(family, ()), *_OF_IMAGES.get(arch, ()))
    of_family += ("expert_gating_func",) if family in BY_SIGMOID else ()
    own = {f"ARCH.{key}" for key in of_family}
    apart = {*AS_METADATA.get(family, {}).values()}  # which are parameters
    unknown = []
    for key, value in metadata.items():
        name = f"ARCH.{key.removeprefix(f'{arch}.')}" if key.startswith(f"{arch}.") else key
        if name in own or _USED.fullmatch(name):
            _check_type(key, value, where)
            continue
        if name in apart or _NEUTRAL_ENTRIES.fullmatch(name):
            continue
        fixed = next((FIXED[k] for k, pattern in _FIXED.items() if pattern.fullmatch(name)), None)
        if fixed is None:
            unknown.append(key)
        elif not all(item in fixed for item in np.ravel(value).tolist()):
            raise BundleError(
                f"{where}: metadata {key} = {value!r:.60} is not supported for {arch}; supported "
                f"is {' or '.join(map(repr, fixed))}, or none. If the model computes without it, "
                f"remove it: gguf_new_metadata.py --remove-metadata {key}"
            )
    return sorted(unknown)


def _check_type(key: str, value: Any, where: str) -> None:
    """Raise BundleError for an entry of another type than llama.cpp has for its name."""
    wanted, fits = next((said, fits) for end, said, fits in _TYPES if re.search(f"({end})$", key))
    values = [value]
    if isinstance(value, np.ndarray) and _LISTED.search(key):
        values = [int(item) if isinstance(item, bool) else item for item in value.tolist()]
    if not values or not all(map(fits, values)):
        raise BundleError(
            f"{where}: metadata {key} must be {wanted}, is {value!r:.60}; download or convert the "
            "model again"
        )
