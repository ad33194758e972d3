"""The parts of a run that is about to train: its adapters, method, weights, and progress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.core.notes import warning
from runtime.data.rows import Rows
from runtime.machine.machine import Machine, read_machine
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Method, Start, started
from runtime.plan.plan import Plan
from runtime.run.budget import (
    training_machine,
)
from runtime.run.folder import (
    STATE_OF_METHOD,
    RunFolder,
)
from runtime.run.results import Events
from runtime.run.session import Session
from runtime.run.team import Team
from runtime.run.trainer import Progress
from runtime.storage.saves import State
from runtime.storage.scratch import MappedTensors

if TYPE_CHECKING:
    from runtime.methods.full.weights import FullWeights


def state_of(
    config: TrainConfig,
    session: Session,
    folder: RunFolder,
    rows: Rows,
    state: State | None,
    team: Team,
) -> tuple[Adapters, Method]:
    """The adapters and the method of a save, or before the first step without one."""
    if state is None:
        return first_state(config, session, folder, rows, team)
    return _saved_state(config, session, folder, rows, state, team)


def first_state(
    config: TrainConfig, session: Session, folder: RunFolder, rows: Rows, team: Team
) -> tuple[Adapters, Method]:
    """The adapters and the method before the first step; begins the logs."""
    adapters = _first_adapters(config, session, folder)
    running = _method(config, session, adapters, folder, rows, team)
    folder.start_logs(running.log_header() if running.keeps_log else None)
    team.compare("the first adapters", adapters.digest())
    return adapters, running


def _saved_state(
    config: TrainConfig,
    session: Session,
    folder: RunFolder,
    rows: Rows,
    state: State,
    team: Team,
) -> tuple[Adapters, Method]:
    """The adapters and the method of a save; goes on with its logs."""
    save, manifest = folder.saves.place(state.step), session.bundle.manifest
    if config.trains_all:
        adapters = _first_adapters(config, session, folder)
    else:
        adapters = Adapters.load(manifest, save, _scratch_tensors(session, folder))
    running = _method(config, session, adapters, folder, rows, team, fresh=False)
    running.read(save / STATE_OF_METHOD)
    folder.go_on_with_logs(state, running.keeps_log)
    folder.publish(state.step)  # a kill may have come between the save and this copy of it
    team.compare("the saved adapters", adapters.digest())
    return adapters, running


def _scratch_tensors(session: Session, folder: RunFolder) -> MappedTensors:
    return MappedTensors(folder.path, "adapters", Adapters.shapes(session.bundle.manifest))


def _first_adapters(config: TrainConfig, session: Session, folder: RunFolder) -> Adapters:
    """The first adapters of a training: those in a file or run, or new ones."""
    manifest, tensors = session.bundle.manifest, _scratch_tensors(session, folder)
    if config.adapter is None:
        adapters = Adapters.initial(manifest, config.seed, tensors)
        if config.trains_prefix:
            from runtime.methods.first_prefix import fill_prefix  # other runs need it not

            fill_prefix(session.model, adapters, config.seed, session.plan.bucket)
            folder.write_initial(adapters)
    else:
        adapters = Adapters.load(manifest, Path(config.adapter), tensors)
    return adapters


def _method(
    config: TrainConfig,
    session: Session,
    adapters: Adapters,
    folder: RunFolder,
    rows: Rows,
    team: Team,
    fresh: bool = True,
) -> Method:
    manifest = session.bundle.manifest
    begin = Start(
        session.model,
        session.plan,
        adapters,
        folder.path,
        len(manifest.blocks),
        manifest.widest,
        session.weights,
        rows,
        fresh,
        folder.write_initial,
        team.workers,
    )
    return started(config, begin)


def weights_of(
    config: TrainConfig, bundle: Bundle, chosen: Plan, folder: RunFolder, done: int
) -> FullWeights | None:
    """The weights that the run trains after `done` steps; None if it trains adapters."""
    if not config.trains_all:
        return None
    from runtime.methods.full.run_weights import open_weights  # other runs need not load it

    return open_weights(config, bundle, folder.path, done, prefetch=chosen.prefetch)


def progress_of(folder: RunFolder, state: State | None) -> Progress:
    """How far the run has come: seconds, and the evaluations that no lost step came before."""
    if state is None:
        return Progress(evaluations=folder.evaluations(0), others=folder.other_evaluations())
    evaluations = folder.evaluations(state.step, state.evaluated)
    others = folder.other_evaluations()
    return Progress(state.step, folder.check_logs(state), evaluations, others)


def machine_of_run(config: TrainConfig, bundle: Bundle) -> Machine:
    """This machine and process, with the heap values of `--machine FILE` if it is given."""
    machine = training_machine(config, bundle)
    if config.machine is None:
        return machine
    return msgspec.structs.replace(machine, heap=read_machine(Path(config.machine)).heap)


def announce(chosen: Plan, events: Events) -> None:
    if chosen.warning:
        events.note(warning(chosen.warning))
    events.plan(chosen)
