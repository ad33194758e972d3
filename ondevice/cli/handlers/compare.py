"""Handles `ondevice compare`: compares training methods."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.config.compare import CompareConfig
from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import note, out


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(CompareConfig, arguments)
    from harness.compare.compare import check_methods, compare
    from harness.compare.report import to_text

    check_methods(config)
    report = compare(config, note)
    if arguments.json:
        out(json.dumps(report))
        return
    out(f"{to_text(report)}\n\nplots are in {Path(config.output) / 'compare.html'}")
