"""Which bundles' graphs may run: those that this user's own exports wrote, or that the user trusts.

MLX runs a graph without checking it, so a graph from elsewhere could do anything that the process
may do. The cache folder holds the checksums of the graphs that may run as they lie in a bundle.
All others are traced anew (see `runtime.run.traced_graphs`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.core.errors import StorageError
from runtime.core.files import storage_errors, write_atomic
from runtime.core.paths import cache_folder, is_mine


def graphs_checksum(manifest: Manifest) -> str:
    """The SHA-256 of a bundle's graphs: their own checksums, and the programs that call them."""
    sources = (manifest.mlx_version, manifest.device, manifest.block_types, manifest.graphs)
    return hashlib.sha256(msgspec.json.encode(sources, order="sorted")).hexdigest()


def are_trusted(manifest: Manifest) -> bool:
    """Whether the bundle's graphs may run as they lie."""
    return bool(manifest.graphs) and is_mine(_path_of(manifest))


def trust_graphs(manifest: Manifest, reason: str) -> None:
    """Let the bundle's graphs run as they lie; `reason` says why, for whoever looks.

    Raises:
        StorageError: the cache folder cannot be written.
    """
    path = _path_of(manifest)
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{reason}\n".encode())
    except StorageError as problem:
        raise StorageError(
            f"{problem}; what may run is kept in that folder: set XDG_CACHE_HOME to another"
        ) from None


def _path_of(manifest: Manifest) -> Path:
    return cache_folder() / "trusted" / graphs_checksum(manifest)
