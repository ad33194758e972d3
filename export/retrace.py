"""A bundle's graphs traced again, for another MLX or device; its weights stay as they are."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from export.cut.model import cut_model
from export.pack import Progress, no_progress, set_device, write_graphs
from ondevice.bundle.checks import check_manifest
from ondevice.bundle.manifest import BlockType
from ondevice.bundle.store import GRAPHS, MANIFEST, Bundle, lock_bundle, manifest_bytes, open_bundle
from ondevice.errors import BundleError
from ondevice.files import write_atomic


def retrace(path: str | Path, device: str = "auto", progress: Progress = no_progress) -> Bundle:
    """Trace a bundle's graphs again, for this MLX and device.

    The new graphs are written beside the old, then the manifest is replaced atomically.

    Raises:
        BundleError: this mlx-lm would not make the same bundle.
        UsageError: another process uses the bundle or is at it, too.
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
        raise BundleError(f"{path}: its configuration has not its {len(manifest.layers)} layers")
    cut = cut_model(manifest.family, manifest.config)
    if [b.type for b in cut.blocks] != [b.type for b in manifest.blocks] or any(
        _needs(block_type) != _needs(manifest.block_types[name])
        for name, block_type in cut.block_types.items()
    ):
        raise BundleError(f"{path}: this mlx-lm runs the model otherwise; export it again")
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
    for folder in bundle.path.glob(f"{GRAPHS}*"):  # those of an interrupted one, too
        if folder.name != subfolder:
            shutil.rmtree(folder)
    return open_bundle(path)


def _needs(block_type: BlockType) -> tuple[object, ...]:
    """What a block_type's values are and which weights it takes."""
    return (
        block_type.values,
        block_type.parameters,
        [(step.matrix, step.linears) for step in block_type.steps],
    )
