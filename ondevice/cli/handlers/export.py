"""Handles `ondevice export`: converts a checkpoint, and tells the cost."""

from __future__ import annotations

import argparse

from export.config.export import ExportConfig
from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.progress import task_bar
from ondevice.cli.screen import note, out
from runtime.core.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ExportConfig, arguments)
    set_up(keep_heap=False)
    from ondevice.api.bundles import export

    with task_bar("step") as progress:
        done = export(config, progress, note)
    if arguments.json:
        print_json(done)
        return
    out(
        f"{done.bundle}: {format_bytes(done.weights_bytes)} of weights "
        f"({done.bits_per_weight:.2f} bits each), {done.graphs} graphs, "
        f"peak footprint {format_bytes(done.peak_footprint_bytes)}"
    )
    if done.quality is not None:
        out(done.quality.describe())
