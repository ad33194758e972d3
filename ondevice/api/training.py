"""Planning, training and resuming from Python."""

from __future__ import annotations

from collections.abc import Callable
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.api.process import hearing, prepare, refuse_others
from runtime.config.base import expanded
from runtime.config.train import PlanConfig, TrainConfig
from runtime.core.notes import Note, Progress, no_progress

if TYPE_CHECKING:
    from runtime.plan.plan import Plan
    from runtime.run.results import Evaluation, Events, Step, TrainResult

OnStep = Callable[["Step"], None]
OnEvaluation = Callable[[str, "Evaluation"], None]
OnPlan = Callable[["Plan"], None]


def plan(config: PlanConfig, *, on_note: Note | None = None) -> Plan:
    """How training would use a memory budget, as `ondevice plan` shows it; nothing is trained.

    Raises:
        UsageError: rows are longer than the bundle has graphs for.
        BudgetError: nothing fits; the message has the smallest budget that does.
        BundleError: the bundle is damaged, or its graphs cannot be traced.
    """
    refuse_others(config, PlanConfig)
    prepare()
    from runtime.run.start import show_plan

    return show_plan(config, hearing(on_note))


def train(
    config: TrainConfig,
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_progress: Progress = no_progress,
    on_plan: OnPlan | None = None,
    on_note: Note | None = None,
) -> TrainResult:
    """Train in a new run, as `ondevice train` does; the run is also an adapter.

    on_step(step) follows each step, and on_evaluation(when, result) each evaluation of held-out
    data; on_progress(task, done, total) counts its rows. on_plan(plan) receives the memory plan
    before training, on_note(text) lines for people. An exception in a callback ends the run as a
    kill would: `resume` goes on from its last save.

    Raises:
        UsageError: the run exists, or an option does not fit the bundle or the data.
        BudgetError: the budget is too small, or was passed; then the state is saved.
        BundleError, DataError: the bundle, the adapter or the data cannot be used.
        StorageError: the disk is full, or the run cannot be written.
        DivergedError: the loss is not finite; the last save is intact.
        InterruptedRunError: a signal, such as Ctrl-C's, ended the run; its state is saved.
    """
    refuse_others(config, TrainConfig)
    prepare()
    from runtime.run import start

    return start.train(config, _events(on_note, on_step, on_evaluation, on_progress, on_plan))


def resume(
    run: str | Path,
    *,
    bundle: str | Path | None = None,
    budget: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    patience: int | None = None,
    device: str | None = None,
    parallel: str | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_progress: Progress = no_progress,
    on_plan: OnPlan | None = None,
    on_note: Note | None = None,
) -> TrainResult:
    """Go on with a run from its last save, as `ondevice train --resume RUN` does.

    It keeps the run's own settings. bundle: its new place. budget, device: others than before.
    steps, epochs, patience: more of them, with which a finished run goes on. parallel: how
    processes that `mpirun` has started share the work. Callbacks are those of `train`.

    Raises:
        OnDeviceError: as `train`; and UsageError, if `run` holds no run or has done more steps.
    """
    wanted = {
        "bundle": None if bundle is None else expanded(str(bundle)),
        "budget": budget,
        "steps": steps,
        "epochs": epochs,
        "patience": patience,
        "device": device,
        "parallel": parallel,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    prepare()
    from runtime.run import resume as resuming

    events = _events(on_note, on_step, on_evaluation, on_progress, on_plan)
    return resuming.resume(Path(expanded(fspath(run))), events, given)


def _events(
    on_note: Note | None,
    on_step: OnStep | None,
    on_evaluation: OnEvaluation | None,
    on_progress: Progress,
    on_plan: OnPlan | None,
) -> Events:
    """The callbacks of a run, as the runtime calls them."""
    from runtime.run.results import Events

    events = Events(note=hearing(on_note), evaluation=on_progress)
    if on_step is not None:
        events.step = lambda step, steps: on_step(step)
    if on_evaluation is not None:
        events.evaluated = on_evaluation
    if on_plan is not None:
        events.plan = on_plan
    return events
