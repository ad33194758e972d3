"""The tensors of transformers of which mlx-lm's are parts, where the two have other ones.

Only a checkpoint's own tensors show them, so that a bundle's provenance keeps them. Experts, of
which there may be thousands, have one entry for all that lie one below the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from export.sources.source import RENAMED, Origin
from runtime.core.errors import BundleError, UsageError

Origins = Mapping[str, tuple[Origin, ...]]
_MOST = 4096  # experts of a layer


def together(origins: list[Origin]) -> list[Origin]:
    """One origin for all of a list whose names differ by a number alone; else the list."""
    first, words = origins[0], origins[0].name.split(".")
    for at, word in enumerate(words):
        if word == "0" and len(origins) > 1:
            starred = ".".join((*words[:at], "*", *words[at + 1 :]))
            whole = first._replace(name=starred, times=len(origins))
            if list(whole.each) == origins:
                return [whole]
    return origins


def origins_in(provenance: Mapping[str, Any], what: str) -> Origins:
    """The origins of a bundle's tensors, by their names here; those of the same name are left out.

    `what` is to be written, for messages.

    Raises:
        BundleError: the entry is damaged.
        UsageError: they are not all in the model.
    """
    entry, where = provenance.get(RENAMED, {}), provenance.get("name")
    try:
        origins = msgspec.convert(entry, dict[str, tuple[Origin, ...]])
    except msgspec.ValidationError as problem:
        raise BundleError(f"{where}: its list of tensors is damaged: {problem}") from None
    for part in (part for parts in origins.values() for part in parts):
        if not 1 <= part.times <= _MOST:
            raise BundleError(f"{where}: its list of tensors is damaged: {part}")
    origins = {name: tuple(one for p in parts for one in p.each) for name, parts in origins.items()}
    whole: dict[str, set[Origin]] = {}
    for name, parts in origins.items():
        if not parts:
            raise BundleError(f"{where}: its list of tensors is damaged: {name} is from nowhere")
        for part in parts:
            whole.setdefault(part.name, set()).add(part)
    for name, pieces in whole.items():  # each once: layers may have the same tensor
        try:
            complete = _is_tiled(pieces)
        except ValueError as problem:
            raise BundleError(f"{where}: its list of tensors is damaged: {problem}") from None
        if not complete:
            raise UsageError(f"{what}: of {where}'s {name} mlx-lm has not all rows")
    return origins


def _is_tiled(parts: Iterable[Origin]) -> bool:
    """Whether parts of a tensor are all of it; raises ValueError if they cannot be its parts."""
    top = 0
    if len({(part.height, part.transposed, part.across[2]) for part in parts}) != 1:
        raise ValueError("parts of a tensor say different things of it")
    by_columns = any(part.columns for part in parts)
    for part in sorted(parts, key=lambda one: one.across[0] if by_columns else one.first):
        other = (part.first, part.rows, part.height) if by_columns else part.across
        first, count, end = part.across if by_columns else (part.first, part.rows, part.height)
        if count < 1 or first + count > end or first < top or other[:2] != (0, other[2]):
            raise ValueError(f"{part}")
        if first > top:
            return False
        top = first + count
    return top == end
