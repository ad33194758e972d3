"""Handles `ondevice export`: converts a checkpoint, and says what that has cost."""

from __future__ import annotations

import argparse
import json
from functools import partial

import msgspec

from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.cli.progress import task_bar
from ondevice.config.export import ExportConfig
from ondevice.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ExportConfig, arguments)
    set_up(keep_heap=False)
    from export.pack import export_bundle
    from runtime.run.export_engine import ExportEngine
    from runtime.system.footprint import Meter
    from runtime.system.heap import trim_heap

    with (
        Meter(budget_bytes=config.budget_bytes, relieve=trim_heap) as meter,
        task_bar("step") as progress,
    ):
        bundle = export_bundle(
            config, progress, partial(ExportEngine, meter, config.budget_bytes, progress, note)
        )
    manifest = bundle.manifest
    quality = manifest.quality
    facts = {
        "bundle": str(bundle.path),
        "weights_bytes": manifest.weights_nbytes,
        "bits_per_weight": manifest.bits_per_weight,
        "graphs_bytes": sum(graph.nbytes for graph in manifest.graphs.values()),
        "peak_footprint_bytes": meter.peak_bytes,
        "quality": None if quality is None else msgspec.to_builtins(quality),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    print(
        f"{bundle.path}: {format_bytes(manifest.weights_nbytes)} of weights "
        f"({manifest.bits_per_weight:.2f} bits each), {len(manifest.graphs)} graphs, "
        f"peak footprint {format_bytes(meter.peak_bytes)}"
    )
    if quality is not None:
        print(quality.describe())
        if warning := quality.warning():
            note(f"ondevice: warning: {warning}")
