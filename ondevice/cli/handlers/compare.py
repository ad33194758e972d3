"""Handles the commands that compare and measure: compare, report and bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.config.bench import BenchConfig, ReportConfig
from harness.config.compare import CompareConfig
from ondevice.cli.handlers.common import configuration, show
from ondevice.cli.screen import note
from runtime.config.arguments import given
from runtime.core.errors import UsageError
from runtime.parallel.launch import launched


def run_compare(arguments: argparse.Namespace) -> None:
    """Compare training methods."""
    config = configuration(CompareConfig, arguments)
    if launched().size > 1:
        raise UsageError("compare starts the processes of its trainings itself; leave out mpirun")
    from harness.compare.compare import check_methods, compare
    from harness.compare.report import to_text

    check_methods(config)
    report = compare(config, note)
    text = f"{to_text(report)}\n\nplots are in {Path(config.output) / 'compare.html'}"
    show(report, text, arguments.json)


def run_report(arguments: argparse.Namespace) -> None:
    """Write a page about runs."""
    config = configuration(ReportConfig, arguments)
    from harness.report.runs_page import write_page

    runs = write_page([Path(run) for run in config.runs], Path(config.output))
    names = [run.name for run in runs]
    text = f"the page of {', '.join(names)} is {config.output}"
    show({"output": config.output, "runs": names}, text, arguments.json)


def run_bench(arguments: argparse.Namespace) -> None:
    """Run a benchmark."""
    from harness.bench.bench import bench, find, to_text

    if arguments.config is None and "name" not in given(arguments, BenchConfig):
        find("")  # raises, with a list of them
    config = configuration(BenchConfig, arguments)
    report = bench(config, note)
    show(report, to_text(report), arguments.json)
