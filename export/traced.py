"""Traces the graphs of a bundle again, from the model's configuration in its manifest."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from export.cut.model import cut_model
from export.pack import no_progress, set_device, write_graphs
from export.sources.families import MODEL_TYPES
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.store import GRAPHS
from ondevice.bundle.traced import RECORD, TracedGraphs, traced_bytes
from ondevice.errors import BundleError
from ondevice.files import write_atomic
from ondevice.operations.program import BlockType


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
    if [b.type for b in cut.blocks] != [b.type for b in manifest.blocks] or any(
        _needs(block_type) != _needs(manifest.block_types[name])
        for name, block_type in cut.block_types.items()
    ):
        raise BundleError(
            "the mlx-lm that is installed computes the model in another way than the bundle's "
            "manifest says, so that the weights may not fit; export the model again"
        )
    graphs = write_graphs(cut, manifest.buckets, folder, GRAPHS, no_progress)
    traced = TracedGraphs(metadata.version("mlx"), here, cut.block_types, graphs)
    check_manifest(traced.put_into(manifest))
    write_atomic(folder / RECORD, traced_bytes(traced))


def _needs(block_type: BlockType) -> tuple[object, ...]:
    """What must be as in the bundle: a block type's values, and the weights that it reads."""
    return (
        block_type.values,
        block_type.parameters,
        [(one.label, one.matrices(str), one.vectors(str)) for one in block_type.operations],
    )
