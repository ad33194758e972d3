"""Handles `ondevice replay`: rebuilds the adapter of a run from its log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ondevice.cli.handlers.common import configuration, note, set_up
from runtime.config.replay import ReplayConfig
from runtime.core.errors import BundleError, UsageError


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ReplayConfig, arguments)
    set_up()
    from runtime.run.replay import replay

    run = Path(config.run)
    output = run / "replayed" if config.output is None else Path(config.output)
    if config.output is None and output.is_symlink():
        raise UsageError(f"{output} is a symbolic link; name a folder by --output")
    initial = None if config.initial is None else Path(config.initial)
    facts = replay(run, output, config.bundle, initial)
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"{facts['output']}: {facts['steps']} steps from a log of {facts['log_bytes']} bytes")
        if facts["best_step"] is not None:
            print(f"it is what was trained after step {facts['best_step']}, kept by --keep-best")
    if facts["identical"] is False:
        raise BundleError(
            f"{run} holds something else after step {facts['saved_steps']} than its log leads to"
        )
    if facts.get("not_compared"):
        note(f"it is not compared with what the run holds: {facts['not_compared']}")
    if facts["identical"] and not arguments.json:
        print(f"identical to what the run holds after step {facts['saved_steps']}")
