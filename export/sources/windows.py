"""Windows of attention in configurations: which layers see all tokens, and how mlx-lm says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.core.errors import BundleError

FULL, SLIDING = "full_attention", "sliding_attention"


def _gemma_windows(config: dict[str, Any], where: str) -> None:
    """Set "sliding_window_pattern", mlx-lm's key: one layer in so many has global attention.

    As in transformers, "layer_types" decides where it is there.
    """
    given = config.get("layer_types")
    if given:
        full = [i for i, name in enumerate(given) if name == FULL]
        pattern = full[0] + 1 if full else len(given) + 1
    else:
        usual, written = map(config.get, ("sliding_window_pattern", "_sliding_window_pattern"))
        pattern = 6 if usual is None else usual
        if written not in (None, pattern):  # transformers writes it, but reads the other
            raise BundleError(
                f"{where}: _sliding_window_pattern = {written!r} is not read without layer_types; "
                "write it as sliding_window_pattern"
            )
    if not isinstance(pattern, int) or pattern < 1:
        raise BundleError(f"{where}: sliding_window_pattern must be positive, is {pattern!r}")
    types = layer_types(pattern, config["num_hidden_layers"])
    if given and list(given) != types:
        raise BundleError(
            f"{where}: layer_types is not one full_attention in every {pattern} layers; "
            "irregular patterns are not supported"
        )
    if FULL not in types:
        raise BundleError(
            f"{where}: none of {len(types)} layers sees all tokens (layer_types, "
            f"sliding_window_pattern = {pattern}); a model without such a layer is not supported"
        )
    window = config.get("sliding_window")
    if SLIDING in types and (not isinstance(window, int) or window < 1):
        raise BundleError(f"{where}: sliding_window must be a positive integer, is {window!r}")
    config["sliding_window_pattern"] = pattern


def layer_types(pattern: int | str, layers: int) -> list[str]:
    """Types of attention of which every `pattern`-th is global, or those with a G in LLLG."""
    if isinstance(pattern, str):
        return [FULL if letter == "G" else SLIDING for letter in (pattern * layers)[:layers]]
    return [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]


def check_windows(family: str, config: dict[str, Any], where: str) -> None:
    """Raise BundleError where a layer sees only so many tokens: all families' layers but Gemma's.

    Qwen's configurations say `use_sliding_window` and from which layer on (`max_window_layers`).
    Llama's know no windows in transformers, and mlx-lm's take them from `layer_types` alone.
    """
    if family == "gemma3_text":
        _gemma_windows(config, where)
    elif unlike := unlike_full(config):
        window, longest = window_of(config), config.get("max_position_embeddings")
        if unlike != [SLIDING] or window is None or longest is None or window < longest:
            raise BundleError(
                f"{where}: layers with {', '.join(unlike)} (layer_types, sliding_window = "
                f"{window!r}) are not supported for {family}: its layers see all tokens before. "
                "Delete these settings there if the original model computes without them; or, to "
                "train on sequences within the window, set max_position_embeddings (now "
                f"{longest}) to at most its width"
            )
        if family == "llama":  # else mlx-lm's class has windows; no sequence is longer than these
            config.pop("layer_types", None)


def window_of(config: dict[str, Any]) -> int | None:
    """How many tokens a layer with a window sees; None without windows."""
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def unlike_full(config: dict[str, Any]) -> list[str]:
    """The types of attention that layers of these families should have, but for the full one."""
    first = 0 if window_of(config) is not None else config["num_hidden_layers"]
    first = max(first, config.get("max_window_layers", 0))
    types = config.get("layer_types") or [
        FULL if layer < first else SLIDING for layer in range(config["num_hidden_layers"])
    ]
    return sorted({*map(str, types)} - {FULL})


def pattern_of(types: Sequence[str], letters: bool, where: str) -> int | str | None:
    """Types of layers as mlx-lm has them: one global layer in so many, or as LLLG; None for G."""
    if letters:
        if SLIDING not in types:
            return None
        return "".join("G" if name == FULL else "L" for name in types)
    every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if [name == FULL for name in types] != [not (i + 1) % every for i in range(len(types))]:
        raise BundleError(
            f"{where}: layer_types is not one {FULL} in every {every} layers; irregular patterns "
            "are not supported for this architecture"
        )
    return every
