"""Handles `ondevice fuse`: adds an adapter to its bundle's weights, and tells the cost."""

from __future__ import annotations

import argparse

from export.config.fuse import FuseConfig
from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.progress import task_bar
from ondevice.cli.screen import note, out
from runtime.core.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(FuseConfig, arguments)
    set_up(keep_heap=False)
    from ondevice.api.fusing import fuse_as
    from ondevice.cli.describe import describe_fusing

    with task_bar("row") as progress:
        result = fuse_as(config, progress, note)
    quality = result.quality
    if arguments.json:
        print_json(result)
        return
    added = f" with {result.adapted_matrices} adapted matrices" if result.adapted_matrices else ""
    out(
        f"{result.output}: {format_bytes(result.weights_bytes)} of weights{added}, peak footprint "
        f"{format_bytes(result.peak_footprint_bytes)}"
    )
    if quality is not None:
        out(describe_fusing(quality, result.adapted_matrices > 0))
