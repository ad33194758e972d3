"""Handles `ondevice train`: starts or resumes a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.progress import step_bar, task_bar
from ondevice.cli.screen import note, out
from runtime.config.base import flag, given
from runtime.config.train import CHANGEABLE, TrainConfig
from runtime.core.errors import UsageError
from runtime.parallel.launch import speaks

if TYPE_CHECKING:
    from runtime.plan.plan import Plan


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    overrides = given(arguments, TrainConfig)
    if arguments.resume is not None:
        _check_resume(arguments, overrides)
        config = None
    else:
        config = configuration(TrainConfig, arguments)
    set_up()
    from ondevice.cli.describe import (
        describe_fit,
        describe_plan,
        describe_summary,
        describe_validation,
    )
    from runtime.run.results import Events
    from runtime.run.start import resume, train

    quiet = arguments.json

    def open_with(plan: Plan) -> None:
        facts = plan.to_json()
        if arguments.verbose:
            note(describe_plan(facts))
        if not quiet:
            note(describe_fit(facts))

    with task_bar("row") as evaluation, step_bar() as step:
        events = Events(
            plan=open_with,
            note=note,
            step=step,
            evaluation=evaluation,
            evaluated=lambda when, result: note(describe_validation(when, result)),
            lengths=not quiet,  # which the summary has; a comparison shows them once
        )
        if config is None:
            summary = resume(arguments.resume, events, overrides)
        else:
            summary = train(config, events)
    if not speaks():
        return
    if quiet:
        print_json(summary)
        return
    run = arguments.resume if config is None else config.output
    subject = "the run and its adapter are"
    if summary.trained == "full":
        subject = f"ondevice replay {run} --output BUNDLE writes the trained model; the run is"
    out(f"{describe_summary(summary)}\n{subject} in {run}")


def _check_resume(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Refuse options beside `--resume` that would contradict the run's own."""
    own = set(overrides) - set(CHANGEABLE)
    odd = [flag(name) for name in sorted(own)]
    if odd or arguments.config:
        raise UsageError(
            "--resume takes the run's own settings, --budget, --steps or --epochs, --patience, "
            "--device, --parallel and the bundle's new place; leave out "
            f"{', '.join(odd) or '--config'}; to train with other settings, start another run with "
            f"--adapter {arguments.resume}"
        )
