"""Handles `ondevice train`: starts or resumes a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.progress import step_bar, task_bar
from ondevice.cli.screen import note, out
from runtime.config.base import flag, given
from runtime.config.parallel import JOIN, shared_folder
from runtime.config.train import CHANGEABLE, OF_JOINING, TrainConfig
from runtime.core.errors import UsageError
from runtime.parallel.launch import speaks

if TYPE_CHECKING:
    from runtime.plan.plan import Plan


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    overrides = given(arguments, TrainConfig)
    shared = shared_folder(overrides.get("parallel"))
    if shared is not None and shared[0] == JOIN:
        return _join(arguments, overrides, Path(shared[1]))
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
    from runtime.run.resume import resume
    from runtime.run.start import train

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


def _join(arguments: argparse.Namespace, overrides: dict[str, Any], folder: Path) -> None:
    """Help with the training of another device."""
    given_beside = {**overrides, "config": arguments.config, "resume": arguments.resume}
    odd = [name for name, value in given_beside.items() if value and name not in OF_JOINING]
    if odd or "bundle" not in overrides:
        raise UsageError(
            f"--parallel {JOIN}=DIR takes BUNDLE, --output and --machine, and all else from the "
            f"training in {folder}"
            + (f"; leave out {', '.join(map(flag, sorted(odd)))}" if odd else "")
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the one that the training's device shares")
    set_up()
    from runtime.run.join import join

    own = {"bundle": str(Path(overrides["bundle"]).resolve()), "machine": overrides.get("machine")}
    joined = join(folder, Path(overrides.get("output", "run")), own, note)
    if arguments.json:
        return print_json(joined)
    out(
        f"helped in {joined.parts} of {joined.steps} steps\nthe adapter after the last one is in "
        f"{joined.output}"
    )


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
