"""Handles `ondevice data`: shows the rows that training would read."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import out
from runtime.config.inspect import DataConfig


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(DataConfig, arguments)
    from ondevice.cli.describe import describe_lengths, marked
    from runtime.bundle.store import open_bundle
    from runtime.data.overview import confined_overview

    bundle = open_bundle(config.bundle)
    overview = confined_overview(config)
    buckets = bundle.manifest.buckets
    first = next(iter(overview.reports.values()))
    if arguments.json:
        reports = msgspec.to_builtins(overview.reports, str_keys=True)
        facts = {"buckets": list(buckets), "recommended": first.recommended()}
        facts["packing"] = msgspec.to_builtins(overview.packing)
        out(json.dumps({"data": reports, **facts, "row": overview.row}))
        return
    for name, report in overview.reports.items():
        out(f"{name}: {report.describe(buckets)}\n")
    for text in bundle.manifest.warnings:
        out(f"warning: {text}\n")
    out(describe_lengths(first.recommended(), first.longest, buckets))
    if overview.packing is not None:
        out(overview.packing.describe())
    if overview.row:
        colours = sys.stdout.isatty()
        text, means = marked(overview.row, colours)
        out(f"\nrow {config.row}, with what is scored {means}:\n\n{text}", coloured=colours)
