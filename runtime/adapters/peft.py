"""PEFT's LoRA adapters: their files, the names of their tensors, and their configuration.

A module MODULE has `base_model.model.MODULE.lora_A.weight` (r, in) and `.lora_B.weight` (out, r),
an embedding `.lora_embedding_A` (r, V) and `.lora_embedding_B` (D, r): the transposes of ours.
`lora_alpha / r` is our scale, or `lora_alpha / sqrt(r)` with rsLoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from runtime.adapters.lora import LoraSettings
from runtime.adapters.names import (
    OTHER,
    A,
    B,
    ends_with_any,
    inner_name,
    is_names,
    number,
    outer_name,
    unwrapped,
    whole,
)

WEIGHTS, CONFIG, PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
KIND = "peft_type"

_OUTER = "base_model.model."
HEAD = "lm_head"  # of transformers' models, tied or not
_PARTS = {A: "lora_A.weight", B: "lora_B.weight"}
_LOOKED_UP = {A: "lora_embedding_A", B: "lora_embedding_B"}
_BASE = ".base_layer.weight"  # of an embedding or head: its own weight, which PEFT saves as well
# as PEFT writes them; without the prefix, or with the adapter's name, they are saved by hand
_STORED = re.compile(
    rf"(?:{re.escape(_OUTER)})?(?P<module>.+)\.lora_"
    r"(?:(?P<part>[AB])(?:\.default)?\.weight|embedding_(?P<row>[AB])(?:\.default)?)"
)
_KIND = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)\b")
_LIST = re.compile(r"(?:.*?\.)?([^.]+)\.\d+\..*")  # the name of the list of layers
_INSIDE = "model.language_model."  # where transformers has the language model of one that also sees

# further settings of a configuration, beside rank, alpha, dropout and rsLoRA, and their meaning:
# `None`, `False` and empty values are the same as not stating it
_NO_MATTER = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "revision", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "ensure_weight_tying", "eva_config"),
        *("fan_in_fan_out", "target_parameters", "rank_pattern", "alpha_pattern"),
    }
)
_MEANING = {
    "use_dora": "DoRA, which also trains the lengths of rows",
    "bias": "trained biases",
    "lora_bias": "adapters with a bias",
    "modules_to_save": "whole modules that were trained beside the adapters",
    "layer_replication": "a model whose layers are replicated",
    "trainable_token_indices": "trained embeddings of tokens",
    "alora_invocation_tokens": "adapters that only some tokens switch on (aLoRA)",
    "use_qalora": "QALoRA, which averages the adapters' input in groups",
}
_OTHER_TENSORS = {
    "lora_magnitude_vector": _MEANING["use_dora"],
    "lora_B.bias": _MEANING["lora_bias"],
    "modules_to_save": _MEANING["modules_to_save"],
}
_COMPARED = re.compile(r"\^?(?:[\w.-]|\\[.dw])+\$?")  # keys of patterns without repetition
_MOST_PATTERNS = 4096  # more than any model has modules
# initializations that leave the base model as it is; others subtract from its weights
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class UnsupportedError(ValueError):
    """An adapter is of a kind that is not supported; the message says of which, in words."""


def stored_name(name: str, inside: bool = False, lookup: bool = False) -> str:
    """PEFT's name of our tensor; `inside` a model that also sees, as transformers names it.

    `lookup` says that it is an embedding's.
    """
    module, _, part = name.rpartition(".")
    return f"{_OUTER}{module_name(module, inside)}.{(_LOOKED_UP if lookup else _PARTS)[part]}"


def module_name(module: str, inside: bool = False) -> str:
    """transformers' name of a module; `inside` a model that also sees."""
    return outer_name(module, _INSIDE) if inside and module != HEAD else module


def own_name(stored: str) -> str:
    """Our name of PEFT's tensor.

    Raises:
        UnsupportedError: it is of another kind than those of linear layers.
    """
    if match := _STORED.fullmatch(unwrapped(stored)):
        return f"{inner_name(match['module'])}.{A if 'A' in match.group('part', 'row') else B}"
    meaning = next((said for part, said in _OTHER_TENSORS.items() if part in stored), "")
    raise UnsupportedError(
        f"it holds {stored!r:.200}{meaning and f', which means {meaning}'}; only "
        f"{_OUTER}MODULE.lora_A.weight, .lora_B.weight and those of embeddings are supported"
    )


def is_base(stored: str) -> bool:
    """Whether a tensor is an adapted module's own weight."""
    return stored.endswith(_BASE)


def base_module(stored: str) -> str:
    """The module's name, by transformers, of such a tensor."""
    return inner_name(unwrapped(stored).removeprefix(_OUTER).removesuffix(_BASE))


def is_stored_name(name: str) -> bool:
    """Whether a tensor's name is one that PEFT gives."""
    return unwrapped(name).startswith(_OUTER) or _KIND.search(name) is not None


def config_of(
    lora: LoraSettings,
    modules: Iterable[str],
    layers: Iterable[int] | None,
    base_model: str,
    revision: str | None,
    inside: bool = False,
) -> dict[str, Any]:
    """The content of adapter_config.json.

    Args:
        lora: the settings.
        modules: the adapted linear layers, by their names in transformers' model.
        layers: the numbers of the adapted layers; None if all of them are.
        base_model: the name by which transformers loads the model.
        revision: of the model on the hub, if it is known.
        inside: whether the model also sees: its vision tower has modules of the same names.
    """
    names = sorted(modules)
    numbers = None if layers is None or not names else list(layers)
    targets: str | list[str] = sorted({module.split(".")[-1] for module in names})
    outside = any(not any(map(str.isdecimal, module.split("."))) for module in names)
    if outside and (inside or numbers is not None):  # neither numbers nor the pattern would do
        targets, numbers = [module_name(module, inside) for module in names], None
    elif inside:  # a pattern, beside which PEFT allows no numbers of layers
        which = r"\d+" if numbers is None else f"(?:{'|'.join(map(str, numbers))})"
        targets = rf"model\.language_model\.layers\.{which}\.(?:.*\.)?(?:{'|'.join(targets)})"
        numbers = None
    return {
        KIND: "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "auto_mapping": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "layers_to_transform": numbers,
        "layers_pattern": None if numbers is None else _LIST.sub(r"\1", names[0]),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "loftq_config": {},
        "layer_replication": None,
    }


def patterns_of(lora: LoraSettings, ranks: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The settings for modules whose adapters have another rank, so that the scale is the same."""
    others = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    scaled = {
        name: lora.scale * (math.sqrt(rank) if lora.rslora else rank)
        for name, rank in others.items()
    }
    return {"rank_pattern": dict(others), "alpha_pattern": scaled}


def stated_in(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `LoraSettings` that a configuration states: rank, alpha, dropout and rsLoRA.

    Raises:
        UnsupportedError: the adapter is of a kind that is not supported.
        KeyError: something is missing.
    """
    kind = config[KIND]
    if kind != "LORA":
        raise UnsupportedError(f"its {KIND} is {kind!r:.80}; of PEFT's only LORA is supported")
    for key, value in config.items():
        if key not in _NO_MATTER and not _is_plain(key, value):
            meaning = f", which means {_MEANING[key]}" if key in _MEANING else ""
            raise UnsupportedError(f"its {key} is {value!r:.80}{meaning}; this is not supported")
    return {
        "rank": whole(config["r"], "r"),
        "alpha": number(config["lora_alpha"], "lora_alpha"),
        "dropout": number(config.get("lora_dropout", 0.0), "lora_dropout"),
        "rslora": False if (rslora := config.get("use_rslora")) is None else rslora,
    }


def layers_in(config: dict[str, Any]) -> set[int] | None:
    """The numbers of the layers to which a configuration limits an adapter; None where to none.

    Raises:
        ValueError: they are no numbers of layers.
    """
    given = config.get("layers_to_transform")
    numbers = given if isinstance(given, list) else [given]
    if given is None or not numbers:
        return None
    if any(type(layer) is not int or layer < 0 for layer in numbers):
        raise ValueError(f"layers_to_transform is {given!r:.80}, no numbers of layers")
    return set(numbers)


def check_targets(config: dict[str, Any], stored: Iterable[str]) -> None:
    """Raise ValueError for an adapted module that a configuration does not name, or excludes.

    PEFT leaves its tensors out. Expressions for names, which could take forever, are not compared.
    """
    targets, excluded = (config.get(key) or [] for key in ("target_modules", "exclude_modules"))
    weights = config.get("target_parameters") or []
    for key, names in (("target_modules", targets), ("exclude_modules", excluded)):
        if not isinstance(names, str) and not is_names(names):
            raise TypeError(f"{key} is {names!r:.80}, no names of modules")
    tied = [HEAD] if config.get("ensure_weight_tying") else []
    matches = (_STORED.fullmatch(unwrapped(name)) for name in stored)
    for module in sorted({match["module"] for match in matches if match}):
        named = isinstance(targets, str) or not targets or weights
        if not named and not ends_with_any(module, [*targets, *tied]):
            raise ValueError(f"target_modules does not name {module}, {OTHER}")
        if isinstance(excluded, list) and ends_with_any(module, excluded):
            raise ValueError(f"exclude_modules names {module}, {OTHER}")


def check_patterns(config: dict[str, Any], stored: Iterable[str]) -> None:
    """Raise UnsupportedError where a configuration gives an adapted module another scale.

    `stored` are the names of the tensors, whose shapes show the ranks.
    """
    ranks, alphas = (_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha = config["r"], number(config["lora_alpha"], "lora_alpha")
    matches = (_STORED.fullmatch(unwrapped(name)) for name in stored if ranks or alphas)
    for module in sorted({match["module"] for match in matches if match}):
        for r, a in product(_given(ranks, module, rank), _given(alphas, module, alpha)):
            times = r / rank
            if not math.isclose(
                a, alpha * (math.sqrt(times) if config.get("use_rslora") else times)
            ):
                raise UnsupportedError(
                    f"its rank_pattern and alpha_pattern say rank {r:g} and alpha {a:g} of "
                    f"{module!r:.80}: alphas that differ, and other scales; only one is supported"
                )


_Patterns = list[tuple[re.Pattern[str] | None, float]]


def _patterns(config: dict[str, Any], name: str) -> _Patterns:
    """The expressions for ends of modules' names that PEFT makes of a setting's keys, and values.

    One that repeats a part could take forever to compare, and is None. Raises ValueError for
    values that are no numbers, and for too many.
    """
    keys = config.get(name) or {}
    if not isinstance(keys, dict):
        raise TypeError(f"{name} is {keys!r:.80}, no numbers by name")
    if len(keys) > _MOST_PATTERNS:
        raise ValueError(f"{name} has {len(keys)} keys, more than {_MOST_PATTERNS}")
    return [
        (
            re.compile(rf"(?:.*\.)?(?:{key})$") if _COMPARED.fullmatch(key) else None,
            number(value, key),
        )
        for key, value in keys.items()
    ]


def _given(patterns: _Patterns, module: str, usual: float) -> set[float]:
    """The least and the greatest value that a module may have, between which others are.

    They are of the first key that matches, and of those before it that are not compared.
    """
    values = []
    for pattern, value in patterns:
        if pattern is None or pattern.match(module):
            values.append(value)
        if pattern is not None and pattern.match(module):
            break
    else:
        values.append(usual)
    return {min(values), max(values)}


def _is_plain(key: str, value: Any) -> bool:
    """Whether a setting leaves the function of an adapter as it is."""
    if key == "bias":
        return value in (None, "none")
    if key == "init_lora_weights":
        return any(value is start or value == start for start in _PLAIN_STARTS)
    if key == "loftq_config":
        return value in (None, {})
    return value is None or value is False or value in ({}, [], "")
