"""The tensors of transformers of which mlx-lm's are parts, where the two have other ones.

Only a checkpoint's own tensors show them, so that a bundle's provenance keeps them. Experts, of
which there may be thousands, have one entry for all that lie one below the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
        UsageError: an earlier version has not recorded them, or they are not all in the model.
    """
    entry, where = provenance.get(RENAMED, {}), provenance.get("name")
    if entry is True:
        raise UsageError(
            f"{what}: {where} has other tensors in transformers than in mlx-lm, which this bundle "
            "does not list; export it again"
        )
    try:
        origins = msgspec.convert(entry, dict[str, tuple[Origin, ...]])
    except msgspec.ValidationError as problem:
        raise BundleError(f"{where}: its list of tensors is damaged: {problem}") from None
    for part in (part for parts in origins.values() for part in parts):
        if not 1 <= part.times <= _MOST:
            raise BundleError(f"{where}: its list of tensors is damaged: {part}")
    origins = {name: tuple(one for p in parts for one in p.each) for name, parts in origins.items()}
    parts = [part for parts in origins.values() for part in parts]
    held: Counter[str] = Counter()
    for part in {*parts}:  # each once: layers may have the same tensor
        held[part.name] += part.rows * part.across[1]
        if not (_is_within(part.first, part.rows, part.height) and _is_within(*part.across)):
            raise BundleError(f"{where}: its list of tensors is damaged: {part}")
    if missing := [part.name for part in parts if held[part.name] != part.height * part.across[2]]:
        raise UsageError(f"{what}: of {where}'s {missing[0]} mlx-lm has not all rows")
    return origins


def _is_within(first: int, count: int, whole: int) -> bool:
    return first >= 0 and count >= 1 and first + count <= whole
