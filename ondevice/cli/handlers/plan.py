"""Handles `ondevice plan`: shows how training would use a memory budget."""

from __future__ import annotations

import argparse
import json

from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.cli.progress import step_bar, task_bar
from ondevice.config.plan import PlanConfig


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(PlanConfig, arguments)
    set_up()  # the plan counts the BLAS's threads
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_plan
    from runtime.run.start import machine_of, plan_training
    from runtime.run.traced_graphs import with_graphs
    from runtime.system.footprint import Meter

    machine = machine_of(config.machine)
    # as in `_train`: the plan counts what the process has loaded
    with task_bar("row"), step_bar(), Meter():
        bundle = with_graphs(open_bundle(config.bundle), config.device, note)
        plan = plan_training(config, bundle, machine)
    if plan.warning:
        note(f"ondevice: warning: {plan.warning}")
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print(describe_plan(plan.to_json(), per_block=True))
