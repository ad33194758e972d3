"""Handles `ondevice fuse`: adds an adapter to its bundle's weights, and says what that has cost."""

from __future__ import annotations

import argparse
import json

import msgspec

from export.config.fuse import FuseConfig
from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.cli.progress import task_bar
from runtime.core.units import format_bytes


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(FuseConfig, arguments)
    set_up(keep_heap=False)
    from ondevice.api.fusing import fuse_as
    from ondevice.api.process import Said
    from ondevice.cli.describe import describe_fusing

    with task_bar("row") as progress:
        found = fuse_as(config, progress, Said(note, warns=False))
    quality = found.quality
    if arguments.json:
        facts = {
            "output": str(found.path),
            "format": config.format,
            "weights_bytes": found.weights_bytes,
            "adapted_matrices": found.adapted_matrices,
            "peak_footprint_bytes": found.peak_footprint_bytes,
            "quality": None if quality is None else msgspec.to_builtins(quality),
        }
        print(json.dumps(facts))
        return
    added = f" with {found.adapted_matrices} adapted matrices" if found.adapted_matrices else ""
    print(
        f"{found.path}: {format_bytes(found.weights_bytes)} of weights{added}, peak footprint "
        f"{format_bytes(found.peak_footprint_bytes)}"
    )
    if quality is not None:
        print(describe_fusing(quality, found.adapted_matrices > 0))
