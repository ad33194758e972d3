"""The adapters in a model's weights, listed with the model, so that none is added twice."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.core.errors import BundleError, UsageError

IN_CONFIG, IN_GGUF = "ondevice_fused", "ondevice.fused"  # keys of config.json and of GGUF metadata
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(parts: Iterable[tuple[str, bytes]], scale: float) -> str:
    """An adapter's identity: the SHA-256 of its tensors, given by name as bytes, and its scale.

    It is the same for the same values, whichever tool's files they come from. The scale counts as a
    float32: mlx-lm's files have it times the rank and divided again.
    """
    digest = hashlib.sha256(struct.pack("<f", scale))
    for name, data in sorted(parts):
        digest.update(f"\n{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def refuse_held(digest: str, held: Iterable[str], where: str) -> None:
    """Refuse to add an adapter to a model whose weights hold it.

    Raises:
        UsageError: `digest` is one of those that the model at `where` holds.
    """
    if digest in held:
        raise UsageError(
            f"{where} holds this adapter in its weights already, and would get it a second "
            "time; use the bundle without --adapter, or the adapter with the bundle that it was "
            "trained on"
        )


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
