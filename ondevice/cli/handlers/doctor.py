"""Handles `ondevice doctor`: checks this machine, and measures a row of the table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.config.bench import BenchConfig
from harness.config.doctor import DoctorConfig
from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import note, out
from runtime.core.errors import OnDeviceError

if TYPE_CHECKING:
    from harness.doctor.finding import Finding


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(DoctorConfig, arguments)
    from harness.doctor.doctor import findings, verdict
    from harness.doctor.finding import Status

    checked: list[Finding] = []
    for finding in findings():
        checked.append(finding)
        if not arguments.json:
            out(finding.line())
    facts = [asdict(finding) for finding in checked]
    report: dict[str, Any] = {"verdict": verdict(checked), "findings": facts}
    if not arguments.json:
        out(f"\n{report['verdict']}")
    if config.bench:
        report |= _bench(config, checked, arguments.json)
    if arguments.json:
        out(json.dumps(report))
    broken = [finding.name for finding in checked if finding.status is Status.BROKEN]
    if broken:
        raise OnDeviceError(f"broken: {', '.join(broken)}; the lines above say what to do")


def _bench(config: DoctorConfig, checked: list[Finding], quiet: bool) -> dict[str, Any]:
    """Measure the row; returns it and its report for JSON."""
    from harness.bench.bench import bench, to_text
    from harness.bench.doctor import markdown
    from harness.doctor.duration import describe_duration

    settings = BenchConfig(
        name="doctor",
        bundles=config.bundles,
        models=config.models,
        seq_lens=config.seq_lens,
        steps=2,
        repeats=1,
        output=config.output,
    )
    note(describe_duration(settings, checked))
    report = bench(settings, note)
    row = markdown(report)
    if not quiet:
        out(f"\n{to_text(report)}\n\nthe row to send ({config.output} has all of it):\n\n{row}")
    return {"bench": report, "row": row}
