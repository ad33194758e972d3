"""Starting a run: its plan, folder and data, and what is left of one that is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec

from runtime.bundle.store import Bundle, open_bundle
from runtime.config.base import to_toml
from runtime.config.shared import StepConfig, mix_of
from runtime.config.train import GENERAL, NO_DATA, PlanConfig, TrainConfig
from runtime.core.errors import UsageError
from runtime.core.files import remove
from runtime.core.notes import Note, silent, warning
from runtime.data.run_rows import MixedRows, absolute, open_run_rows, with_length
from runtime.data.samples import Samples
from runtime.machine.compute_dtype import choose
from runtime.machine.footprint import Meter
from runtime.machine.machine import Machine, read_machine
from runtime.plan.plan import Plan
from runtime.plan.planner import Planner
from runtime.run.budget import for_values, training, training_machine
from runtime.run.disk import check_disk
from runtime.run.folder import RunFolder
from runtime.run.lora import to_train
from runtime.run.opened import Opened, Progress, machine_of_run, weights_of
from runtime.run.processes import team_of
from runtime.run.results import Events, TrainResult
from runtime.run.schedule import settled
from runtime.run.session import open_checked, open_session
from runtime.run.team import Team
from runtime.run.traced_graphs import with_graphs
from runtime.run.trackers import reporting
from runtime.run.trainer import Trainer
from runtime.run.worker import OF_A_WORKER, files_of, invite, join
from runtime.storage.saves import CONFIG


def plan_training(
    config: StepConfig, bundle: Bundle, machine: Machine | None = None, note: Note = silent
) -> Plan:
    """The plan for this configuration of training, on a machine (default: this machine).

    `note` receives lines for people.

    Raises:
        BudgetError: nothing fits.
        UsageError: rows are longer than the bundle has graphs for, the machine cannot be read, or
            the LoRA settings do not fit the model or the adapter to start from.
    """
    return _plan(*to_train(config, bundle, note), machine, note=note)


def _plan(
    config: StepConfig,
    bundle: Bundle,
    machine: Machine | None,
    workers: int = 1,
    note: Note = silent,
) -> Plan:
    """The plan for a configuration and a bundle with the same LoRA settings."""
    machine = machine or training_machine(config, bundle)
    if config.arithmetic != "auto" and config.arithmetic != machine.arithmetic:
        llvm = machine.llvm and config.arithmetic != "packed"
        machine = msgspec.structs.replace(machine, arithmetic=config.arithmetic, llvm=llvm)
    if config.compute_dtype == "bfloat16" and machine.compute_dtype == "float32":  # not this one
        dtype = choose("bfloat16", machine.device, machine.packed, here=False)
        machine = msgspec.structs.replace(machine, compute_dtype=dtype.name)
    machine = for_values(machine, bundle.manifest, config)
    if config.compute_dtype == "auto":
        note(f"products in {machine.compute_dtype}: {machine.compute_reason}")
    task = training(config, bundle.manifest, workers)
    return Planner(bundle.manifest, machine).plan(task, config.budget_bytes)


def show_plan(config: PlanConfig, note: Note) -> Plan:
    """The plan that `ondevice plan` shows: as `plan_training`, for a bundle yet to be opened."""
    import subprocess  # noqa: F401 - in another process `train` reads its rows

    machine = None if config.machine is None else read_machine(Path(config.machine))
    with Meter():  # as in `train`: the plan counts the memory of loaded libraries
        bundle = with_graphs(open_bundle(config.bundle), config.device, note)
        plan = plan_training(config, bundle, machine, note)
    if plan.warning:
        note(warning(plan.warning))
    return plan


def train(config: TrainConfig, events: Events) -> TrainResult:
    """Start a run. Returns its summary.

    Raises:
        OnDeviceError: the run was refused, or failed; a refused run leaves no files behind.
    """
    same = {name: value for name, value in vars(config).items() if name not in OF_A_WORKER}
    with team_of(config.parallel, "train", same) as team:
        if team.rank:
            own = {"bundle": absolute(config.bundle), "machine": config.machine}
            return join(Path(config.output), own, team)
        with Meter(budget_bytes=config.budget_bytes) as meter:
            bundle = open_checked(config.bundle, config.device, events.note, team.size)
            folder = RunFolder(Path(config.output))
            existed = folder.path.exists()
            with folder.created():
                try:
                    with reporting(config, folder.path, 0, events) as events:
                        return _begin(config, bundle, folder, events, meter, team)
                except BaseException as problem:
                    team.dismiss(problem)  # others may have files in the folder
                    folder.remove_scratch_of_workers()
                    # config.toml is the last file of a beginning
                    if folder.lock.is_there and not (folder.path / CONFIG).exists():
                        remove_refused(folder, existed)
                    raise


def _begin(
    config: TrainConfig,
    bundle: Bundle,
    folder: RunFolder,
    events: Events,
    meter: Meter,
    team: Team,
) -> TrainResult:
    """Plan and train a run in its empty folder."""
    config, bundle = to_train(
        with_length(config, bundle, folder.path, events.evaluation), bundle, events.note
    )
    chosen = None if config.pack else _first_plan(config, bundle, team, events)
    fixed = _with_absolute_paths(config, folder)
    rows = open_run_rows(fixed, bundle, folder.path, events.evaluation)
    for report in rows.reports.values():
        events.note(report.describe(bundle.manifest.buckets, events.lengths))
    if isinstance(rows.train, MixedRows):
        events.note(rows.train.describe(mix_of(fixed.mix or "")[0]))
    samples = Samples.of(fixed, bundle.manifest, rows.train)
    if samples.packing_report is not None:
        events.note(samples.packing_report.describe())
    if chosen is None:  # packing takes memory, so a refusal before it would name too little
        chosen = _first_plan(config, bundle, team, events)
    fixed = settled(fixed, samples, events.note)
    fixed = replace(fixed, compute_dtype=chosen.compute_dtype)  # no longer "auto"
    if fixed.patience and fixed.eval_every > (fixed.steps or 0):
        raise UsageError(
            f"--eval-every {fixed.eval_every} > --steps {fixed.steps}: nothing is evaluated before "
            "the end, so --patience would have no effect"
        )
    if rows.valid is None and fixed.eval_every:
        raise UsageError(
            "--eval-every needs held-out data: give --eval-data or --valid-split, or a "
            "folder with a valid file as --data"
        )
    check_disk(fixed, bundle.manifest, chosen, folder, team)
    for name in folder.token_files:
        folder.checksums.record(name)
    team.share(files_of(fixed, folder, chosen, None))
    bundle = team.joined(bundle)
    weights = weights_of(fixed, bundle, chosen, folder, 0)
    session = open_session(bundle, chosen, weights, events.note)
    opened = Opened(fixed, folder, session, samples, rows, team, meter, events)
    trainer = Trainer(opened, None, Progress())
    invite(opened)
    folder.write_plan(chosen)
    folder.write(CONFIG, to_toml(fixed).encode())
    if bundle.manifest.quality is not None and bundle.manifest.quality.is_hurt:
        events.note(warning(bundle.manifest.quality.warning()))
    for text in bundle.manifest.warnings:
        events.note(warning(text))
    events.announce(chosen)
    return trainer.run()


def _first_plan(config: TrainConfig, bundle: Bundle, team: Team, events: Events) -> Plan:
    return _plan(config, bundle, machine_of_run(config, bundle), team.size, events.note)


def _with_absolute_paths(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """The configuration with absolute paths, valid from any working directory."""
    return replace(
        config,
        bundle=str(Path(config.bundle).resolve()),
        data=absolute(config.data),
        output=str(folder.path.resolve()),
        eval_data=None if config.eval_data is None else absolute(config.eval_data),
        also_evaluate=tuple(
            name if name in (GENERAL, NO_DATA) else absolute(name) for name in config.also_evaluate
        ),
        mix=None if config.mix is None else _absolute_mix(config.mix),
        adapter=None if config.adapter is None else absolute(config.adapter),
        machine=None if config.machine is None else absolute(config.machine),
        parallel=None,  # of the processes at hand, not of the run
    )


def _absolute_mix(mix: str) -> str:
    data, share = mix_of(mix)
    return f"{absolute(data)}:{share}"


def remove_refused(folder: RunFolder, existed: bool) -> None:
    """Remove the files of a run that never started, and nothing else."""
    if not existed:
        shutil.rmtree(folder.path)
        return
    for path in folder.path.iterdir():  # it was empty before
        remove(path)
