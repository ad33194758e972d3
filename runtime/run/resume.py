"""Resuming a run from its last save, with its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.bundle.store import Bundle
from runtime.config.base import load, to_toml
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.core.lookalikes import Kind, instead, is_comparison
from runtime.core.notes import silent, warning
from runtime.core.units import counted, format_bytes
from runtime.data.run_rows import absolute, open_run_rows
from runtime.data.samples import Samples
from runtime.machine.backend import arithmetic
from runtime.machine.footprint import Meter
from runtime.machine.machine import Machine
from runtime.plan.plan import Plan
from runtime.plan.planner import Planner
from runtime.run.budget import reason_to_replan, training
from runtime.run.disk import check_disk
from runtime.run.ending import ENDS, FURTHER
from runtime.run.folder import PLAN, RunFolder
from runtime.run.lora import to_resume
from runtime.run.opened import Opened, Progress, machine_of_run, progress_of, weights_of
from runtime.run.processes import team_of
from runtime.run.results import Events, TrainResult
from runtime.run.schedule import learning_rate, settled
from runtime.run.session import open_checked, open_session
from runtime.run.team import Team
from runtime.run.trackers import reporting
from runtime.run.trainer import Trainer
from runtime.run.worker import OF_A_WORKER, files_of, invite, join
from runtime.storage.saves import CONFIG, State, another_run


def resume(path: Path, events: Events, wanted: dict[str, Any]) -> TrainResult:
    """Continue the run in `path` from its last save, with its plan.

    `wanted` are new values of CHANGEABLE settings; a bundle among them is the new place of the
    run's. A new plan is made under another budget, or if the plan no longer fits. Tile sizes may
    then differ, which changes the last bits of results.
    With another number of steps in all, the learning rate goes on as the schedule over that many
    steps says. More patience lets a run go on that its patience has ended.

    Raises:
        OnDeviceError: the run cannot go on; its saves stay as they are.
    """
    same = {name: value for name, value in wanted.items() if name not in OF_A_WORKER}
    with team_of(wanted.get("parallel"), f"train --resume {path}", same) as team:
        if team.rank:
            moved = {"bundle": absolute(wanted["bundle"])} if "bundle" in wanted else {}
            own = {"machine": None, **moved}
            return join(path, own, team)
        try:
            return _resume(path, events, wanted, team)
        except BaseException as problem:
            team.dismiss(problem)
            RunFolder(path).remove_scratch_of_workers()
            raise


def _resume(path: Path, events: Events, wanted: dict[str, Any], team: Team) -> TrainResult:
    """See `resume`; on rank 0."""
    folder = RunFolder(path)
    if not (path / CONFIG).exists() or is_comparison(path):
        why = instead(path, Kind.RUN) or (
            f"it has no {CONFIG}, which is there from the first step on; start the training with "
            f"--output {path}"
        )
        raise UsageError(f"{path} holds no run to resume: {why}")
    with folder.locked():
        folder.prepare_to_resume()
        for name in (CONFIG, PLAN):
            folder.check(name)
        folder.plan()  # first, since it says whether this version reads the run's files
        before = folder.config()
        if "epochs" in wanted:
            wanted = {"steps": None, **wanted}  # the run's own, which they replace
        if "bundle" in wanted:
            wanted = {**wanted, "bundle": absolute(wanted["bundle"])}
        config = replace(load(TrainConfig, path / CONFIG, wanted), output=str(path), parallel=None)
        save = folder.saves.latest()
        state = None if save is None else folder.check_save(save)
        progress = progress_of(folder, state)
        with (
            Meter(budget_bytes=config.budget_bytes) as meter,
            reporting(config, path, progress.done, events) as events,
        ):
            return _continue(before, config, folder, state, progress, events, meter, team)


def _continue(
    before: TrainConfig,
    config: TrainConfig,
    folder: RunFolder,
    state: State | None,
    progress: Progress,
    events: Events,
    meter: Meter,
    team: Team,
) -> TrainResult:
    """Go on after a save, or from the start without one; `before` is its configuration so far."""
    bundle = open_checked(config.bundle, config.device, events.note, team.size)
    config, bundle = to_resume(config, bundle)
    chosen = _plan_again(config, bundle, folder, events, team.size)
    events.announce(chosen)
    rows = open_run_rows(config, bundle, folder.path, events.evaluation)
    for name in folder.token_files:
        folder.check(name)
    samples = Samples.of(config, bundle.manifest, rows.train)
    config = settled(config, samples, silent if config.steps == before.steps else events.note)
    if config.all_steps < progress.done:
        raise UsageError(
            f"--steps {config.steps} < {progress.done}, the steps that {folder.path} has done; "
            "give more"
        )
    check_disk(config, bundle.manifest, chosen, folder, team, progress.done)
    team.share(files_of(config, folder, chosen, state))
    bundle = team.joined(bundle)
    weights = weights_of(config, bundle, chosen, folder, progress.done)
    if weights is not None and (behind := weights.behind(1)):
        events.note(
            f"the weights of {behind} of {len(bundle.manifest.blocks)} blocks are damaged or gone: "
            f"the first step rebuilds them from the bundle and the log of {progress.done} steps"
        )
    metrics = folder.metrics.path
    if state is None and metrics.exists() and metrics.stat().st_size:
        events.note(f"{folder.path} has no save: it is trained from its beginning")
    session = open_session(bundle, chosen, weights, events.note)
    if state is not None and (others := state.other_arithmetic(arithmetic())):
        events.note(warning(f"the last bits may differ from those of an unbroken run: {others}"))
    opened = Opened(config, folder, session, samples, rows, team, meter, events)
    trainer = Trainer(opened, state, progress)
    invite(opened)
    if trainer.ended:
        _say_ended(trainer, before, events)
    folder.write_plan(chosen)
    folder.write(CONFIG, to_toml(config).encode())
    if not trainer.ended:
        events.note(
            f"resuming after step {progress.done} of {config.steps}, on the rows that the run has "
            "kept: its data is not read again"
        )
        _say_rates(before, config, progress.done, events)
    return trainer.run()


def _say_ended(trainer: Trainer, before: TrainConfig, events: Events) -> None:
    """Note that the run is over.

    Raises:
        UsageError: more steps are asked for, which would change nothing.
    """
    path = trainer.folder.path
    finished = f"this run is finished, after step {trainer.done}: {ENDS[trainer.ended]}"
    further = FURTHER.get(trainer.ended)
    ways = f"give --resume {path} {further}, or " if further else ""
    said = f"{finished}; to train further, {ways}{another_run(path)}"
    if trainer.config.all_steps > before.all_steps:
        raise UsageError(said)
    events.note(said)


def _say_rates(before: TrainConfig, config: TrainConfig, done: int, events: Events) -> None:
    """Note that the next step's learning rate is no longer that of the configuration before."""
    rate_before, rate = (
        learning_rate(options, min(done, options.all_steps)) for options in (before, config)
    )
    if rate_before != rate:
        events.note(
            f"the learning-rate schedule is now over {config.steps} steps: the next step's "
            f"rate is {rate:.3g}, over {before.steps} steps it would be {rate_before:.3g}"
        )


def _plan_again(
    config: TrainConfig, bundle: Bundle, folder: RunFolder, events: Events, workers: int
) -> Plan:
    """The plan that the run was started with, or a new one where it cannot be executed again."""
    stored, manifest = folder.plan(), bundle.manifest
    machine = machine_of_run(config, bundle)
    task, planner = training(config, manifest, workers), Planner(manifest, machine)
    made = planner.again(stored, task)
    reason = reason_to_replan(stored, made, planner, task, config.budget_bytes)
    if not reason:
        _say_facts(stored, made, machine, events)
        return made
    chosen = planner.plan(task, config.budget_bytes)
    rounds, before = (
        (plan.sizes, plan.bucket, plan.kept_products)  # MLPs there are not sliced
        for plan in (chosen, stored)
    )
    last_bits = "; other slices or tile sizes may change its last bits" if rounds != before else ""
    events.note(f"the run is planned anew: {reason}{last_bits}")
    return chosen


def _say_facts(before: Plan, now: Plan, machine: Machine, events: Events) -> None:
    """Note what is no longer as it was when a plan was made, though the plan stays."""
    threads = machine.blas.threads
    if before.threads != threads:
        planned = counted(before.threads, "thread")
        events.note(
            f"the run was planned for {planned}, and {threads} run here; its plan still fits"
        )
    if before.limit_bytes != now.limit_bytes:
        limits = [
            "none" if limit is None else format_bytes(limit)
            for limit in (now.limit_bytes, before.limit_bytes)
        ]
        events.note(f"the memory limit of this process is {limits[0]}, no longer {limits[1]}")
    if before.minimum_bytes != now.minimum_bytes:
        events.note(
            f"the smallest budget that fits is {format_bytes(now.minimum_bytes, up=True)} here, "
            f"not {format_bytes(before.minimum_bytes, up=True)}"
        )
