"""The lengths for which the positions in a bundle's graphs are computed as its model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONGEST, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


def positions_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary positions of a bundle's configuration, flat."""
    settings = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    return {
        key: value for group in settings if isinstance(group, dict) for key, value in group.items()
    }


def short_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens for which longrope has its short factors, which alone graphs hold.

    None where positions are scaled otherwise, or its long factors are the same.
    """
    scaling = positions_of(config)
    if scaling.get("short_factor") == scaling.get("long_factor"):
        return None
    length = scaling.get(_ORIGINAL)
    return length if isinstance(length, int) else None


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """The most tokens for which a model was made; None where its configuration does not say."""
    longest, short = config.get(_LONGEST), short_length(config)
    lengths = [length for length in (longest, short) if isinstance(length, int) and length > 0]
    return min(lengths, default=None)


def longest_by(config: Mapping[str, Any]) -> str:
    """The setting of a configuration that says its longest sequence, for messages."""
    return _LONGEST if longest_sequence(config) == config.get(_LONGEST) else _ORIGINAL
