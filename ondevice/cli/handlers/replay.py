"""Handles `ondevice replay`: rebuilds the adapter of a run from its log."""

from __future__ import annotations

import argparse
from pathlib import Path

from ondevice.cli.handlers.common import configuration, note, print_json, set_up
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
    found = replay(run, output, config.bundle, initial)
    if arguments.json:
        print_json(found)
    else:
        print(f"{found.output}: {found.steps} steps from a log of {found.log_bytes} bytes")
        if found.best_step is not None:
            print(f"it is what was trained after step {found.best_step}, kept by --keep-best")
    if found.identical is False:
        raise BundleError(
            f"{run} holds something else after step {found.saved_steps} than its log leads to"
        )
    if found.not_compared:
        note(f"it is not compared with what the run holds: {found.not_compared}")
    if found.identical and not arguments.json:
        print(f"identical to what the run holds after step {found.saved_steps}")
