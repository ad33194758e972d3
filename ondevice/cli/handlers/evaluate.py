"""Handles `ondevice eval`: measures a bundle, or compares it with its checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.progress import task_bar
from ondevice.cli.screen import note, out
from runtime.config.evaluate import EvalConfig
from runtime.core.errors import BundleError
from runtime.core.units import counted, format_bytes
from runtime.parallel.launch import speaks


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(EvalConfig, arguments)
    set_up()
    if config.source is not None:
        _eval_beside_source(config, arguments.json)
        return
    if config.task == "bfcl":
        _eval_calls(config, arguments.json)
        return
    from ondevice.cli.describe import describe_task
    from runtime.run.evaluate import run_eval
    from runtime.run.results import Events

    with tempfile.TemporaryDirectory() as scratch, task_bar("row") as progress:
        result = run_eval(config, Path(scratch), Events(evaluation=progress, note=note))
    if not speaks():
        return
    if arguments.json:
        print_json(result)
    else:
        out(
            f"{describe_task(result)}, over {counted(result.scored_tokens, 'token')} in "
            f"{counted(result.rows, 'row')}\n"
            f"peak footprint {format_bytes(result.peak_footprint_bytes)}, budget "
            f"{format_bytes(result.budget_bytes)}"
        )
    if result.loss is None:
        adapter = "" if config.adapter is None else f" with the adapter {config.adapter}"
        raise BundleError(
            f"{config.bundle}{adapter} gives {result.rows_not_finite} of {result.rows} rows "
            "a loss that is not finite: weights are not numbers, or too large; export the model "
            "again, or leave out the adapter"
        )


def _eval_calls(config: EvalConfig, as_json: bool) -> None:
    """Have function calls generated and judged, and keep the answers where they are wanted."""
    from harness.measure.provenance import repository_only

    with repository_only():
        from harness.tasks.bfcl.score import describe, run

    with task_bar("question") as progress:
        report = run(config, lambda done, total: progress("answering", done, total), note)
    if as_json:
        print_json(report)
    else:
        out(describe(report))


def _eval_beside_source(config: EvalConfig, as_json: bool) -> None:
    """Compare the bundle's predictions with those of the checkpoint that it came from."""
    from ondevice.api.use import beside_source

    with task_bar("block") as progress:
        quality = beside_source(config, progress, note)
    if as_json:
        print_json(quality)
    else:
        out(quality.describe())
