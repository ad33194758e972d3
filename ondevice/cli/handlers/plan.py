"""Handles `ondevice plan`: shows how training would use a memory budget."""

from __future__ import annotations

import argparse
import json

from ondevice.cli.handlers.common import configuration, set_up
from ondevice.cli.progress import step_bar, task_bar
from ondevice.cli.screen import note, out
from runtime.config.train import PlanConfig


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(PlanConfig, arguments)
    set_up()  # the plan counts the BLAS's threads
    from ondevice.cli.describe import describe_plan
    from runtime.run.start import show_plan

    with task_bar("row"), step_bar():  # the plan counts what training loads
        plan = show_plan(config, note).to_json()
    out(json.dumps(plan, indent=1) if arguments.json else describe_plan(plan, per_block=True))
