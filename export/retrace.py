"""Retracing: writes a bundle's graphs again, for another MLX or device; the weights stay."""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from export.cut.model import cut_model
from export.pack import no_progress, set_device, write_graphs
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import manifest_bytes
from ondevice.bundle.store import GRAPHS, MANIFEST, Bundle, lock_bundle, open_bundle
from ondevice.engine import Progress
from ondevice.errors import BundleError
from ondevice.files import write_atomic
from ondevice.operations.program import BlockType


def retrace(path: str | Path, device: str = "auto", progress: Progress = no_progress) -> Bundle:
    """Replace a bundle's graphs by ones for the MLX that is installed and for `device`.

    The new graphs are written to another folder before the manifest is replaced, in one step.

    Raises:
        BundleError: with the installed mlx-lm, the model would have other programs.
        UsageError: another process is using or retracing the bundle.
    """
    lock = lock_bundle(open_bundle(path).path, alone=True)
    try:
        return _retrace(path, device, progress)
    finally:
        os.close(lock)


def _retrace(path: str | Path, device: str, progress: Progress) -> Bundle:
    bundle = open_bundle(path)
    manifest = bundle.manifest
    here = set_device(device)
    if manifest.config.get("num_hidden_layers") != len(manifest.layers):
        raise BundleError(
            f"{path}: the bundle has {len(manifest.layers)} layers, its configuration says "
            f"{manifest.config.get('num_hidden_layers')!r}; export it again"
        )
    cut = cut_model(manifest.family, manifest.config)
    if [b.type for b in cut.blocks] != [b.type for b in manifest.blocks] or any(
        _needs(block_type) != _needs(manifest.block_types[name])
        for name, block_type in cut.block_types.items()
    ):
        raise BundleError(
            f"{path}: the mlx-lm that is installed computes the model in another way than the one "
            "that exported it, so that the weights' layout may not fit; export it again"
        )
    version = metadata.version("mlx")
    folders = {graph.file.rpartition("/")[0] for graph in manifest.graphs.values()}
    subfolder = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{GRAPHS}-{version}-{here}")
    if subfolder in folders:
        subfolder += "-again"
    try:
        graphs = write_graphs(cut, manifest.buckets, bundle.path, subfolder, progress)
        fresh = replace(
            manifest, graphs=graphs, block_types=cut.block_types, mlx_version=version, device=here
        )
        check_manifest(fresh)
    except BaseException:
        shutil.rmtree(bundle.path / subfolder, ignore_errors=True)
        raise
    write_atomic(bundle.path / MANIFEST, manifest_bytes(fresh))
    for folder in bundle.path.glob(f"{GRAPHS}*"):  # also what an interrupted retrace left
        if folder.name != subfolder:
            shutil.rmtree(folder)
    return open_bundle(path)


def _needs(block_type: BlockType) -> tuple[object, ...]:
    """What must not change: a block type's values, and the weights that it reads."""
    return (
        block_type.values,
        block_type.parameters,
        [(one.label, one.matrices(str), one.vectors(str)) for one in block_type.operations],
    )
