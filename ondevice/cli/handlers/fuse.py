"""Handles `ondevice fuse`: adds an adapter to its bundle's weights, and says what that has cost."""

from __future__ import annotations

import argparse

from export.config.fuse import FuseConfig
from ondevice.cli.handlers.common import configuration, note, print_json, set_up
from ondevice.cli.progress import task_bar
from runtime.core.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(FuseConfig, arguments)
    set_up(keep_heap=False)
    from ondevice.api.fusing import fuse_as
    from ondevice.cli.describe import describe_fusing

    with task_bar("row") as progress:
        found = fuse_as(config, progress, note)
    quality = found.quality
    if arguments.json:
        print_json(found)
        return
    added = f" with {found.adapted_matrices} adapted matrices" if found.adapted_matrices else ""
    print(
        f"{found.output}: {format_bytes(found.weights_bytes)} of weights{added}, peak footprint "
        f"{format_bytes(found.peak_footprint_bytes)}"
    )
    if quality is not None:
        print(describe_fusing(quality, found.adapted_matrices > 0))
