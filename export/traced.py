"""Traces the graphs of a bundle again, from the model's configuration in its manifest."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from export.bundle import no_progress, set_device, write_graphs
from export.cut.model import cut_model
from export.sources.families import MODEL_TYPES
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import GRAPHS
from runtime.bundle.traced import RECORD, TracedGraphs, check_programs, traced_bytes
from runtime.core.errors import BundleError
from runtime.core.files import write_atomic


def trace_graphs(manifest: Manifest, device: str, folder: Path) -> None:
    """Trace a model's graphs into `folder`, for its sequence buckets, and write their record.

    Raises:
        BundleError: the architecture is not supported, or the model has other programs here than
            the bundle's manifest says.
    """
    if manifest.family not in MODEL_TYPES.values():
        raise BundleError(
            f"architecture {manifest.family!r:.40} is not supported; supported are "
            f"{', '.join(sorted(set(MODEL_TYPES.values())))}"
        )
    if (said := manifest.config.get("num_hidden_layers")) != len(manifest.layers):
        raise BundleError(
            f"the bundle has {len(manifest.layers)} layers, its configuration says {said!r:.40}"
        )
    here = set_device(device)
    cut = cut_model(manifest.family, manifest.config)
    check_programs(manifest, cut.block_types, tuple(cut.blocks))
    graphs = write_graphs(cut, manifest.buckets, folder, GRAPHS, no_progress)
    traced = TracedGraphs(metadata.version("mlx"), here, cut.block_types, tuple(cut.blocks), graphs)
    check_manifest(traced.put_into(manifest))
    write_atomic(folder / RECORD, traced_bytes(traced))
