"""Handles `ondevice compare`: compares training methods."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.config.compare import CompareConfig
from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import note, out
from runtime.core.errors import UsageError
from runtime.parallel.launch import launched


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(CompareConfig, arguments)
    if launched().size > 1:
        raise UsageError("compare starts the processes of its trainings itself; leave out mpirun")
    from harness.compare.compare import check_methods, compare
    from harness.compare.report import to_text

    check_methods(config)
    report = compare(config, note)
    if arguments.json:
        out(json.dumps(report))
        return
    out(f"{to_text(report)}\n\nplots are in {Path(config.output) / 'compare.html'}")
