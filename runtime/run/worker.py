"""The workers of a run: their files, and the training of one that is not rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from runtime.config.base import load, to_toml
from runtime.config.shared import DataOptions, StepConfig
from runtime.config.train import NO_DATA, TrainConfig
from runtime.data.run_rows import MIX, TOKENS, open_run_rows
from runtime.data.samples import Samples
from runtime.machine.footprint import Meter
from runtime.plan.plan import Plan
from runtime.plan.planner import Planner
from runtime.run.budget import plan_of_first, training
from runtime.run.disk import places_of
from runtime.run.folder import (
    EVALUATIONS,
    OTHER_EVALUATIONS,
    PLAN,
    SPEEDS,
    RunFolder,
    WorkerFolder,
    plan_bytes,
    read_plan,
)
from runtime.run.lora import to_resume
from runtime.run.opened import Opened, machine_of_run, progress_of, weights_of
from runtime.run.results import Events, TrainResult
from runtime.run.session import open_checked, open_session
from runtime.run.team import ADAPTER, WORKERS, Team, adapter_files, of_bundle, versions
from runtime.run.trainer import Trainer
from runtime.storage.checksums import CHECKSUMS
from runtime.storage.saves import CONFIG, STATE, State

OF_A_WORKER = ("bundle", "output", "machine")  # options that may differ among the workers of a run
# options on which a step depends, besides `StepConfig`
OF_STEPS = ("data", "mix", "seed", "epsilon", "noise", "weight_decay")


def join(output: Path, own: Mapping[str, Any], team: Team) -> TrainResult:
    """Train as a worker other than rank 0, with its rows, plan and save; returns the same summary.

    `own` are settings that only this worker's machine knows.
    """
    own_folder = output.absolute() / WORKERS / str(team.rank)
    places_of(team, own_folder)  # for rank 0, which looks whether the disk has room
    with (
        team.receive(own_folder) as path,
        worker(path, own, team) as trainer,
    ):
        return trainer.run()


@contextmanager
def worker(path: Path, own: Mapping[str, Any], team: Team) -> Iterator[Trainer]:
    """The training of a worker that has received its files into a folder.

    `own` are settings that only this worker's machine knows.
    """
    folder = WorkerFolder(path)
    with folder.locked():
        folder.saves.folder.mkdir(exist_ok=True)
        config = load(TrainConfig, path / CONFIG, {})
        config = replace(config, **_received(config, path), **own, output=str(path))
        save = folder.saves.latest()
        state = None if save is None else folder.check_save(save)
        progress = progress_of(folder, state)
        with Meter(budget_bytes=config.budget_bytes) as meter:
            bundle = open_checked(config.bundle, config.device, workers=team.size)
            config, bundle = to_resume(config, bundle)
            bundle = team.joined(bundle)
            rows = open_run_rows(config, bundle, path)
            samples = Samples.of(config, bundle.manifest, rows.train)
            chosen = plan_of_first(
                read_plan(path / PLAN, "give all machines that version"),
                Planner(bundle.manifest, machine_of_run(config, bundle)),
                training(config, bundle.manifest, team.size),
                config.budget_bytes,
            )
            weights = weights_of(config, bundle, chosen, folder, progress.done)
            session = open_session(bundle, chosen, weights)
            opened = Opened(config, folder, session, samples, rows, team, meter, Events())
            yield Trainer(opened, state, progress)


def invite(opened: Opened) -> None:
    """Let devices join the run through the team's folder, if it has one.

    What they get says how steps are computed, and no more, so it is the same when a run goes on.
    """
    fleet = opened.team.workers.fleet
    if fleet is None:
        return
    config, folder, session = opened.config, opened.folder, opened.session
    names = {setting.name for options in (StepConfig, DataOptions) for setting in fields(options)}
    settings = {name: getattr(config, name) for name in (*names, *OF_STEPS)}
    settings |= {"bundle": "bundle", "adapter": ADAPTER if config.adapter else None}
    plain = type(config)(**settings, also_evaluate=(NO_DATA,))
    least = {"limit_bytes": None, "minimum_bytes": session.plan.predicted_peak_bytes}
    files: dict[str, Path | bytes] = {
        CONFIG: to_toml(plain).encode(),
        PLAN: plan_bytes(msgspec.structs.replace(session.plan, **least)),
        **adapter_files(config.adapter),
        **{name: folder.path / name for name in (TOKENS[0], MIX) if (folder.path / name).exists()},
    }
    log = folder.trajectory.path.read_text().splitlines(keepends=True)
    facts = {**versions(), **of_bundle(session.bundle)}
    fleet.begin(facts, files, log, opened.events.note)
    opened.events.note(f"others join by ondevice train BUNDLE --parallel join={fleet.path}")


def files_of(
    config: TrainConfig, folder: RunFolder, chosen: Plan, state: State | None
) -> dict[str, Path | bytes]:
    """What `join` needs, by name: of a run's folder, and of the adapter to start from."""
    files: dict[str, Path | bytes] = {
        CONFIG: to_toml(config).encode(),
        PLAN: plan_bytes(chosen),
    }
    names = [*folder.token_files, CHECKSUMS, OTHER_EVALUATIONS, SPEEDS]
    if state is not None:
        save = folder.saves.place(state.step).relative_to(folder.path)
        names += [EVALUATIONS, *state.logs, *(str(save / name) for name in (*state.files, STATE))]
    else:
        files |= adapter_files(config.adapter)
    return files | {name: folder.path / name for name in names}


def _received(config: TrainConfig, path: Path) -> dict[str, Any]:
    """The settings of a run whose data and first adapter were received into a folder."""
    train, valid = (path / name for name in TOKENS)
    settings: dict[str, Any] = {"valid_split": None}
    if train.exists():
        settings["data"] = str(train)
    if valid.exists():
        settings["eval_data"] = str(valid)
    if config.adapter is not None:
        settings["adapter"] = str(path / ADAPTER)
    return settings
