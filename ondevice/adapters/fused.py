"""Which adapters a model holds in its weights: kept with the model, so that none is added twice."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ondevice.errors import BundleError

IN_CONFIG, IN_GGUF = "ondevice_fused", "ondevice.fused"  # keys of config.json and of GGUF metadata
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(parts: Iterable[tuple[str, bytes]], scale: float) -> str:
    """What names an adapter: the SHA-256 of its tensors, given by name as bytes, and its scale.

    It is the same for the same values, whichever tool's files they come from.
    """
    found = hashlib.sha256(scale.hex().encode())
    for name, data in sorted(parts):
        found.update(f"\n{name} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()


def adapters_in(provenance: Mapping[str, Any], where: str) -> list[str]:
    """The adapters that a model of this provenance holds, by their digests.

    Raises:
        BundleError: the entry is damaged.
    """
    entry = provenance.get("fused", {})
    return checked(entry.get("adapters", []) if isinstance(entry, dict) else entry, where)


def checked(value: object, where: str) -> list[str]:
    """Digests that a file has listed. Raises BundleError if they are none."""
    if isinstance(value, list) and all(isinstance(v, str) and _DIGEST.fullmatch(v) for v in value):
        return value
    raise BundleError(f"{where}: its list of fused adapters is damaged: {value!r:.80}")
