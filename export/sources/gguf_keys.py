"""Which metadata of a GGUF file is used, which computes nothing, and which is refused.

Names are those of llama.cpp's loader and of the gguf library; ARCH stands for the architecture,
and * for a number or a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from export.sources.gguf_config import entries_of
from export.sources.gguf_names import ARCHITECTURES
from runtime.adapters.fused import IN_GGUF
from runtime.core.errors import BundleError

_Neutral = tuple[object, ...]


def _names(prefix: str, words: str) -> Iterator[str]:
    return (f"{prefix}.{word}" for word in words.split())


USED: frozenset[str] = frozenset(
    (
        IN_GGUF,
        *_names("general", "architecture name alignment"),
        "split.count",
        *_names(
            "ARCH",
            """
            context_length embedding_length block_count feed_forward_length attention.head_count
            attention.head_count_kv attention.key_length attention.value_length
            attention.key_length_swa attention.value_length_swa attention.layer_norm_rms_epsilon
            attention.sliding_window attention.sliding_window_pattern rope.dimension_count
            rope.dimension_count_swa rope.freq_base rope.freq_base_swa rope.scale_linear
            rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
            """,
        ),
        *_names(
            "tokenizer.ggml",
            """
            model pre tokens token_type scores merges bos_token_id eos_token_id unknown_token_id
            padding_token_id eot_token_id eom_token_id add_bos_token add_eos_token
            add_space_prefix
            """,
        ),
        *_names("tokenizer", "chat_template chat_template.* chat_templates"),
    )
)
# why it computes nothing: the entries
_NEUTRAL: dict[str, tuple[str, ...]] = {
    "who made the file, of what, and how": (
        *_names(
            "general",
            """
            author version organization finetune basename description quantized_by size_label
            license license.name license.link url doi uuid repo_url source.* base_model.* dataset.*
            tags languages file_type
            """,
        ),
        *_names("quantize.imatrix", "file dataset entries_count chunks_count"),
        "imatrix.*",
    ),
    "each tensor has its own type and shape": ("ARCH.vocab_size",),
    "the file is whole": ("split.no", "split.tensors.count"),
    "of generation": (
        *_names("general.sampling", "*"),
        *_names(
            "tokenizer.ggml",
            """
            fim_pre_token_id fim_suf_token_id fim_mid_token_id
            fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id
            middle_token_id suppress_tokens
            """,
        ),
    ),
    "of encoders and classifiers": (
        *_names(
            "ARCH",
            """
            pooling_type classifier.output_labels classifier.pooling_type decoder_start_token_id
            """,
        ),
        *_names("tokenizer.ggml", "token_type_count seperator_token_id cls_token_id mask_token_id"),
    ),
    "of norms that these models do not have": tuple(
        _names("ARCH.attention", "layer_norm_epsilon group_norm_epsilon group_norm_groups")
    ),
    "a remark": ("ARCH.rope.scaling.finetuned",),
    "a copy of the vocabulary": ("tokenizer.huggingface.json",),
}
NEUTRAL: frozenset[str] = frozenset(name for names in _NEUTRAL.values() for name in names)

# entries that may be computed with: the values that change nothing; the first name that fits counts
_VALUES: dict[_Neutral, tuple[str, ...]] = {
    ("model",): ("general.type",),
    (2,): ("general.quantization_version",),
    ("reference", "Meta AI original pth"): ("ARCH.tensor_data_layout",),
    (0, 1): tuple(
        _names(
            "ARCH",
            """
            logit_scale residual_scale embedding_scale expert_weights_scale attention.output_scale
            attention.value_scale expert_gating_func
            """,
        )
    ),
    (1,): (
        "ARCH.attention.causal",
        *_names("ARCH.rope.scaling", "attn_factor yarn_attn_factor yarn_beta_slow"),
    ),
    (-1, 1): ("ARCH.rope.scaling.yarn_ext_factor",),
    (32,): ("ARCH.rope.scaling.yarn_beta_fast",),
    (0,): (
        "ARCH.*",  # all that no other list has
        *_names(
            "tokenizer.ggml",
            """
            add_sep_token remove_extra_whitespaces precompiled_charsmap normalizer.lowercase
            normalizer.strip_accents
            """,
        ),
        *("tokenizer.rwkv.world", "xielu.*", "diffusion.*", "clip.*", "adapter.*"),
    ),
}
FIXED: dict[str, _Neutral] = {name: values for values, names in _VALUES.items() for name in names}


def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name).replace(r"\*", ".+") for name in names))


_KNOWN = _pattern(USED | NEUTRAL)
_FIXED = {name: _pattern(frozenset({name})) for name in FIXED}


def unknown_metadata(metadata: dict[str, Any], family: str, where: str) -> list[str]:
    """The entries in no list, for a warning.

    Args:
        metadata: of the file, by key.
        family: of its model.
        where: the file, for messages.

    Raises BundleError for an entry that would have to be computed, and is not.
    """
    unknown, own = [], {f"ARCH.{key}" for key in entries_of(family)}
    arch = ARCHITECTURES[family]
    for key, value in metadata.items():
        name = f"ARCH.{key.removeprefix(f'{arch}.')}" if key.startswith(f"{arch}.") else key
        if _KNOWN.fullmatch(name) or name in own:
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
