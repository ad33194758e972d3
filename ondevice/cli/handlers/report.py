"""Handles `ondevice report`: writes a page about runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.config.report import ReportConfig
from ondevice.cli.handlers.common import configuration, set_up
from ondevice.cli.screen import out


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ReportConfig, arguments)
    if config.samples:
        set_up()
    from harness.report.runs_page import write_page

    runs = write_page([Path(run) for run in config.runs], Path(config.output), config.samples)
    if arguments.json:
        out(json.dumps({"output": config.output, "runs": [run.name for run in runs]}))
        return
    out(f"the page of {', '.join(run.name for run in runs)} is {config.output}")
