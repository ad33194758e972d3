"""Handles the commands that compare and measure: compare, report and bench."""

from __future__ import annotations

from pathlib import Path

from harness.config.bench import BenchConfig, ReportConfig
from harness.config.compare import CompareConfig
from ondevice.cli.handlers.common import show
from ondevice.cli.screen import note
from runtime.core.errors import UsageError
from runtime.parallel.launch import launched


def run_compare(config: CompareConfig, as_json: bool) -> None:
    """Compare training methods."""
    if launched().size > 1:
        raise UsageError("compare starts the processes of its trainings itself; leave out mpirun")
    from harness.compare.compare import check_methods, compare
    from harness.compare.report import to_text

    check_methods(config)
    report = compare(config, note)
    text = f"{to_text(report)}\n\nplots are in {Path(config.output) / 'compare.html'}"
    show(report, text, as_json)


def run_report(config: ReportConfig, as_json: bool) -> None:
    """Write a page about runs."""
    from harness.report.runs_page import write_page

    runs = write_page([Path(run) for run in config.runs], Path(config.output))
    names = [run.name for run in runs]
    text = f"the page of {', '.join(names)} is {config.output}"
    show({"output": config.output, "runs": names}, text, as_json)


def run_bench(config: BenchConfig, as_json: bool) -> None:
    """Run a benchmark."""
    from harness.bench.bench import bench, to_text

    report = bench(config, note)
    show(report, to_text(report), as_json)
