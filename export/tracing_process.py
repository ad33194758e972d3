"""Traces the graphs of a model into a folder, in a process with limits.

A bundle from elsewhere may hold any configuration, so the memory and the CPU time of tracing
are limited. Of the bundle this process reads only the manifest.
"""

from __future__ import annotations

from pathlib import Path

from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import read_manifest
from runtime.core.errors import BundleError
from runtime.machine.backend import prepare


def trace(text: str, name: str, device: str, folder: Path) -> None:
    """Trace the graphs of the manifest in a text, of a bundle that messages call `name`."""
    prepare(keep_heap=False)  # before MLX is imported
    manifest = read_manifest(text.encode(), name)
    check_manifest(manifest)
    from export.graph_files import trace_graphs

    try:
        trace_graphs(manifest, device, folder)
    except BundleError as problem:
        raise BundleError(f"{name}: {problem}") from None
