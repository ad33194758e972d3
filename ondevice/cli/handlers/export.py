"""Handles `ondevice export`: converts a checkpoint, and says what that has cost."""

from __future__ import annotations

import argparse
import json

import msgspec

from export.config.export import ExportConfig
from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.cli.progress import task_bar
from runtime.core.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ExportConfig, arguments)
    set_up(keep_heap=False)
    from ondevice.api.bundles import export
    from ondevice.api.process import Said

    with task_bar("step") as progress:
        done = export(config, progress, Said(note, warns=False))
    manifest = done.bundle.manifest
    facts = {
        "bundle": str(done.path),
        "weights_bytes": manifest.weights_nbytes,
        "bits_per_weight": manifest.bits_per_weight,
        "graphs_bytes": sum(graph.nbytes for graph in manifest.graphs.values()),
        "peak_footprint_bytes": done.peak_footprint_bytes,
        "quality": None if done.quality is None else msgspec.to_builtins(done.quality),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    print(
        f"{done.path}: {format_bytes(manifest.weights_nbytes)} of weights "
        f"({manifest.bits_per_weight:.2f} bits each), {len(manifest.graphs)} graphs, "
        f"peak footprint {format_bytes(done.peak_footprint_bytes)}"
    )
    if done.quality is not None:
        print(done.quality.describe())
