"""Handles `ondevice slice`: cuts a bundle into parts for several machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from export.config.export import SliceConfig
from ondevice.cli.handlers.common import configuration, print_json
from ondevice.cli.screen import out


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(SliceConfig, arguments)
    from runtime.bundle.store import open_bundle, write_slices
    from runtime.core.units import format_bytes

    output = Path(config.output)
    slices = write_slices(open_bundle(config.bundle), config.count, output, config.force)
    if arguments.json:
        print_json([{"bundle": each.path, "bytes": each.manifest.held_nbytes} for each in slices])
        return
    for each in slices:
        out(f"{each.path}: {format_bytes(each.manifest.held_nbytes)} of weights")
