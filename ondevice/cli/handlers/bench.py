"""Handles `ondevice bench`: runs a benchmark."""

from __future__ import annotations

import argparse
import json

from harness.config.bench import BenchConfig
from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import note, out
from runtime.config.base import given


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from harness.bench.bench import bench, find, to_text

    if arguments.config is None and "name" not in given(arguments, BenchConfig):
        find("")  # raises, with a list of them
    config = configuration(BenchConfig, arguments)
    report = bench(config, note)
    out(json.dumps(report) if arguments.json else to_text(report))
