"""Windows of attention in configurations: which layers see all tokens, and how mlx-lm says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.core.errors import BundleError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(pattern: int | str, layers: int) -> list[str]:
    """Types of attention of which every `pattern`-th is global, or those with a G in LLLG."""
    if isinstance(pattern, str):
        return [FULL if letter == "G" else SLIDING for letter in (pattern * layers)[:layers]]
    return [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]


def unlike_full(config: dict[str, Any]) -> list[str]:
    """The types of attention that layers of these families should have, but for the full one."""
    slides = config.get("use_sliding_window", True) and config.get("sliding_window") is not None
    first = 0 if slides else config["num_hidden_layers"]
    first = max(first, config.get("max_window_layers", 0))
    types = config.get("layer_types") or [
        FULL if layer < first else SLIDING for layer in range(config["num_hidden_layers"])
    ]
    return sorted({*map(str, types)} - {FULL})


def is_wide(window: object, longest: object) -> bool:
    """Whether a window is as wide as the longest sequence, whose length may be unknown."""
    return type(window) is int and type(longest) is int and 0 < longest <= window


def pattern_of(types: Sequence[str], letters: bool, where: str) -> int | str:
    """Types of layers as mlx-lm has them: one global layer in so many, or as LLLG."""
    if letters:
        if SLIDING not in types:
            raise BundleError(
                f"{where}: layer_types has {FULL} alone, beside a sliding_window: mlx-lm's class "
                "does not compute layers that have neither a window nor positions"
            )
        return "".join("G" if name == FULL else "L" for name in types)
    if FULL not in types:
        raise BundleError(
            f"{where}: none of {len(types)} layers sees all tokens (layer_types, "
            "sliding_window_pattern); a model without such a layer is not supported"
        )
    every = types.index(FULL) + 1
    if [name == FULL for name in types] != [not (i + 1) % every for i in range(len(types))]:
        raise BundleError(
            f"{where}: layer_types is not one {FULL} in every {every} layers; irregular patterns "
            "are not supported for this architecture"
        )
    return every
