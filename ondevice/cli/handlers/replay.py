"""Handles `ondevice replay`: rebuilds the adapter of a run from its log."""

from __future__ import annotations

import argparse
from pathlib import Path

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.screen import note, out
from runtime.config.train import ReplayConfig
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
    result = replay(run, output, config.bundle, initial)
    if arguments.json:
        print_json(result)
    else:
        out(f"{result.output}: {result.steps} steps from a log of {result.log_bytes} bytes")
        if result.best_step is not None:
            out(f"it is what was trained after step {result.best_step}, kept by --keep-best")
    if result.identical is False:
        why = f"; bits may differ here: {others}" if (others := result.other_arithmetic) else ""
        raise BundleError(
            f"{run} holds something else after step {result.saved_steps} than its log leads to{why}"
        )
    if result.not_compared:
        note(f"it is not compared with what the run holds: {result.not_compared}")
    if result.identical and not arguments.json:
        out(f"identical to what the run holds after step {result.saved_steps}")
