"""Handles `ondevice inspect`: shows a bundle."""

from __future__ import annotations

import argparse
import json

from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import out
from runtime.config.inspect import InspectConfig


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(InspectConfig, arguments)
    from ondevice.cli.describe import describe_bundle, facts_of
    from runtime.bundle.store import open_bundle

    bundle = open_bundle(config.bundle)
    if config.verify:
        bundle.verify()
    if arguments.json:
        out(json.dumps({**facts_of(bundle), "verified": config.verify}, indent=1))
        return
    out(describe_bundle(bundle))
    if config.verify:
        out("every file agrees with its checksum")
