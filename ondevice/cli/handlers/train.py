"""Handles the commands that train: plan, data, train and replay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.cli.handlers.common import print_json, set_up, show
from ondevice.cli.progress import step_bar, task_bar
from ondevice.cli.screen import note, out
from runtime.config.arguments import given
from runtime.config.base import flag, load
from runtime.config.parallel import JOIN, shared_folder
from runtime.config.train import CHANGEABLE, OF_JOINING, TrainConfig
from runtime.core.errors import BundleError, DataError, UsageError
from runtime.parallel.launch import speaks

if TYPE_CHECKING:
    from runtime.config.inspect import DataConfig
    from runtime.config.train import PlanConfig, ReplayConfig
    from runtime.data.report import DataReport
    from runtime.plan.plan import Plan


def run_plan(config: PlanConfig, as_json: bool) -> None:
    """Show how training would use a memory budget."""
    set_up()  # the plan counts the BLAS's threads
    from ondevice.cli.describe import describe_plan
    from runtime.run.start import show_plan

    with task_bar(), step_bar():  # the plan counts what training loads
        plan = show_plan(config, note).to_json()
    if as_json:
        print_json(plan, indent=1)
    else:
        out(describe_plan(plan, per_block=True))


def run_data(config: DataConfig, as_json: bool) -> None:
    """Show the rows that training would read."""
    from ondevice.cli.describe import describe_lengths, marked
    from runtime.bundle.store import open_bundle
    from runtime.data.overview import confined_overview

    bundle = open_bundle(config.bundle)
    with task_bar() as progress:
        overview = confined_overview(config, progress)
    buckets = bundle.manifest.buckets
    first = next(iter(overview.reports.values()))
    if as_json:
        facts = {"data": overview.reports, "buckets": buckets, "recommended": first.recommended()}
        print_json({**facts, "packing": overview.packing, "row": overview.row})
        return _check_kept(overview.reports)
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
        out(f"\nrow {config.row}, with what is scored {means}:\n", coloured=colours)
        out(text, is_data=True, coloured=colours)
    _check_kept(overview.reports)


def _check_kept(reports: Mapping[str, DataReport]) -> None:
    """Raise DataError where a split that training reads has no row."""
    for name, report in reports.items():
        if not report.kept and (report is next(iter(reports.values())) or name == "valid"):
            raise DataError(
                f"{report.source} leaves no row for {name}, of {report.read} that were read"
            )


def run_train(arguments: argparse.Namespace) -> None:
    """Start or resume a run, or help with that of another device."""
    overrides = given(arguments, TrainConfig)
    shared = shared_folder(overrides.get("parallel"))
    if shared is not None and shared[0] == JOIN:
        return _join(arguments, overrides, Path(shared[1]))
    if arguments.resume is not None:
        _check_resume(arguments, overrides)
        config = None
    else:
        config = load(TrainConfig, arguments.config, overrides)
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

    with task_bar() as evaluation, step_bar() as step:
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
    run = arguments.resume if config is None else config.output
    takers = "generate and eval" if summary.trained == "prefix" else "generate, eval and fuse"
    end = f"the run and its adapter are in {run}; {takers} take --adapter {run}"
    if summary.trained == "full":
        end = f"ondevice replay {run} --output BUNDLE writes the trained model; the run is in {run}"
    show(summary, f"{describe_summary(summary)}\n{end}", quiet)


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
    text = (
        f"helped in {joined.parts} of {joined.steps} steps\nthe adapter after the last one is in "
        f"{joined.output}"
    )
    show(joined, text, arguments.json)


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


def run_replay(config: ReplayConfig, as_json: bool) -> None:
    """Rebuild the adapter of a run from its log."""
    set_up()
    from runtime.run.replay import replay
    from runtime.storage.saves import unfinished

    run = Path(config.run)
    if text := unfinished(run):
        note(text)
    output = run / "replayed" if config.output is None else Path(config.output)
    if config.output is None and output.is_symlink():
        raise UsageError(f"{output} is a symbolic link; name a folder by --output")
    initial = None if config.initial is None else Path(config.initial)
    with task_bar() as progress:
        result = replay(run, output, config.bundle, initial, progress)
    text = f"{result.output}: {result.steps} steps from a log of {result.log_bytes} bytes"
    if result.best_step is not None:
        text += f"\nit is what was trained after step {result.best_step}, kept by --keep-best"
    show(result, text, as_json)
    if result.identical is False:
        why = f"; bits may differ here: {others}" if (others := result.other_arithmetic) else ""
        raise BundleError(
            f"{run} holds something else after step {result.saved_steps} than its log leads to{why}"
        )
    if result.not_compared:
        note(f"it is not compared with what the run holds: {result.not_compared}")
    if result.identical and not as_json:
        out(f"identical to what the run holds after step {result.saved_steps}")
