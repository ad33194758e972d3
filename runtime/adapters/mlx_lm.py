"""mlx-lm's LoRA adapters: their files and their configuration. Names and shapes are ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.adapters.lora import LoraSettings
from runtime.adapters.names import OTHER, A, B, inner_name, is_names, layer_of, number, whole

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
KIND = "fine_tune_type"
_OLDER = {"A": A, "B": B}  # mlx-vlm's names of tensors
PREFIX = "prefix"  # ours: mlx-lm has no prefix tuning


def config_of(lora: LoraSettings, layers: int, keys: Iterable[str]) -> dict[str, Any]:
    """The content of adapter_config.json.

    Args:
        lora: the settings; mlx-lm knows only the scale that follows from alpha.
        layers: how many of the last layers have adapters.
        keys: the adapted modules, named from their layer on.
    """
    return {
        KIND: "lora",
        "num_layers": layers,
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": sorted(set(keys)),
        },
    }


def stated_in(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `LoraSettings` that a configuration states: rank, alpha and dropout.

    mlx-lm's names no alpha: it is the scale times the rank. Raises KeyError or TypeError.
    """
    parameters = parameters_of(config)
    rank = whole(parameters["rank"], "rank")
    return {
        "rank": rank,
        "alpha": number(parameters["scale"], "scale") * rank,
        "dropout": number(parameters.get("dropout", 0.0), "dropout"),
    }


def check_targets(config: dict[str, Any], stored: Iterable[str], layers: int) -> None:
    """Raise ValueError for an adapted module that a configuration does not name.

    mlx-lm, which compares whole names in a layer or in the model, leaves its tensors out.
    `layers` is how many the model has.
    """
    count, keys = config.get("num_layers"), parameters_of(config).get("keys")
    if keys is not None and not is_names(keys):
        raise TypeError(f"keys is {keys!r:.80}, no names of modules")
    last = 0 if count is None else whole(count, "num_layers")
    anywhere = {inner_name(key) for key in keys or ()}  # whole names, also of earlier layers
    for module in sorted({own_name(name).rpartition(".")[0] for name in stored} - anywhere):
        layer = layer_of(module)
        if keys is not None and module.partition(f".{layer}.")[2] not in keys:
            raise ValueError(f"keys does not name {module}, {OTHER}")
        if last > 0 and layer is not None and layer < layers - last:
            raise ValueError(f"num_layers is {last} of {layers}, and leaves out {module}, {OTHER}")


def parameters_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rank, scale and dropout. Older mlx-vlm has them outside, and calls the scale alpha."""
    if KIND not in config and "lora_parameters" not in config and "alpha" in config:
        return {**config, "scale": config["alpha"]}
    parameters: dict[str, Any] = config["lora_parameters"]
    return parameters


def own_name(stored: str) -> str:
    """Our name of a tensor: mlx-lm's, of the language model alone, and older mlx-vlm's A and B."""
    module, _, part = inner_name(stored).rpartition(".")
    return f"{module}.{_OLDER.get(part, part)}" if module else part
