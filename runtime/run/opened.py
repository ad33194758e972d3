"""The parts of a run that is about to train: its adapters, method, weights, and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.data.run_rows import RunRows
from runtime.data.samples import Samples
from runtime.machine.footprint import Meter
from runtime.machine.machine import Machine, read_machine
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Method, Start, started
from runtime.plan.plan import Plan
from runtime.run.budget import for_values, training_machine
from runtime.run.folder import STATE_OF_METHOD, RunFolder
from runtime.run.results import Evaluation, Events
from runtime.run.session import Session
from runtime.run.team import Team
from runtime.storage.saves import State
from runtime.storage.scratch import MappedTensors

if TYPE_CHECKING:
    from runtime.methods.full.weights import FullWeights


@dataclass
class Progress:
    """How far earlier processes have brought a run.

    done: steps. seconds: of training. evaluations: by when ("before", a step's number, "after").
    others: of other data, by the data and by when.
    """

    done: int = 0
    seconds: float = 0.0
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    others: dict[str, dict[str, Evaluation]] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A run that is about to train: its settings, model, folder and rows, and who is told of it."""

    config: TrainConfig
    folder: RunFolder
    session: Session
    samples: Samples
    rows: RunRows
    team: Team
    meter: Meter
    events: Events

    def state(self, state: State | None) -> tuple[Adapters, Method]:
        """The adapters and the method of a save, or before the first step without one.

        The logs go on after the save, or begin.
        """
        folder = self.folder
        save = None if state is None else folder.saves.place(state.step)
        adapters = self._adapters(None if self.config.trains_all else save)
        running = self._method(adapters, fresh=state is None)
        if state is None or save is None:
            folder.start_logs(running.log_header() if running.keeps_log else None)
        else:
            running.read(save / STATE_OF_METHOD)
            folder.go_on_with_logs(state, running.keeps_log)
            folder.publish(state.step)  # a kill may have come between the save and this copy of it
        which = "first" if state is None else "saved"
        self.team.compare(f"the {which} adapters", adapters.digest())
        return adapters, running

    def _adapters(self, save: Path | None) -> Adapters:
        """Those of a save; without one the first: those in a file or run, or new ones."""
        config, manifest = self.config, self.session.bundle.manifest
        tensors = MappedTensors(self.folder.path, "adapters", Adapters.shapes(manifest))
        if (path := save or config.adapter) is not None:
            return Adapters.load(manifest, Path(path), tensors)
        adapters = Adapters.initial(manifest, config.seed, tensors)
        if config.trains_prefix:
            from runtime.methods.first_prefix import fill_prefix  # other runs need it not

            fill_prefix(self.session.model, adapters, config.seed, self.session.plan.bucket)
            self.folder.write_initial(adapters)
        return adapters

    def _method(self, adapters: Adapters, fresh: bool) -> Method:
        session = self.session
        begin = Start(
            session.model,
            session.plan,
            adapters,
            self.folder.path,
            session.weights,
            self.rows.train,
            fresh,
            self.folder.write_initial,
            self.team.workers,
        )
        return started(self.config, begin)


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
    machine = for_values(training_machine(config, bundle), bundle.manifest, config)
    if config.machine is None:
        return machine
    return msgspec.structs.replace(machine, heap=read_machine(Path(config.machine)).heap)
