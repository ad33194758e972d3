"""Trackers that a run reports to while it trains: TensorBoard, and Weights & Biases.

A tracker's library is imported only if the run asks for it. It is opened before the plan is made,
so that the plan counts the memory that it takes in this process.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.core.files import write_atomic
from runtime.run.results import Evaluation, Events, Step

TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"
OF_TRACKERS = (TENSORBOARD, WANDB_ID, "wandb")  # files of trackers in a run's folder
PROJECT = "ondevice"  # of Weights & Biases, if the environment names none
TRAIN, VALID = "train", "valid"


Log = Callable[[int, Mapping[str, float]], None]
"""Keeps values by name and step."""


@contextmanager
def _tensorboard(config: TrainConfig, folder: Path, done: int) -> Iterator[Log]:
    """Event files in the folder `tensorboard` of the run."""
    # values of later steps, from an earlier process, are written again
    writer = _library("tensorboardX", "tensorboard").SummaryWriter(
        str(folder / TENSORBOARD), purge_step=done + 1 if done else None
    )

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # before the step may be saved: a killed run has no gap

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(config: TrainConfig, folder: Path, done: int) -> Iterator[Log]:
    """A run of Weights & Biases; its environment variables say where it goes.

    Steps that are trained again after a kill are logged again: values stand against the metric
    `step`, so that they lie over the earlier ones.
    """
    wandb = _library("wandb", "wandb")
    file = folder / WANDB_ID
    if not file.exists():
        write_atomic(file, uuid.uuid4().hex[:8].encode())
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.resolve().name,
            id=file.read_text(),
            resume="allow",
            dir=str(folder),
            config={name: value for name, value in vars(config).items() if value is not None},
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise UsageError(
            f"Weights & Biases cannot be reported to: {error}; log in (wandb login), set "
            "WANDB_MODE=offline, or leave out --report-to"
        ) from None
    run.define_metric("*", step_metric="step")
    failed = True
    try:
        yield lambda step, values: run.log({"step": step, **values})
        failed = False
    finally:
        run.finish(exit_code=int(failed))


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}


@contextmanager
def reporting(config: TrainConfig, folder: Path, done: int, events: Events) -> Iterator[Events]:
    """The events of a run, which are also sent to the tracker that it asks for.

    done: the steps of the run so far.

    Raises:
        UsageError: the tracker is not installed, or cannot be reported to.
    """
    tracker, latest = TRACKERS.get(config.report_to), done
    if tracker is None:
        yield events
        return
    with tracker(config, folder, done) as log:

        def step(done: Step, total: int) -> None:
            nonlocal latest
            latest = done.number
            log(latest, named(TRAIN, done))
            events.step(done, total)

        def evaluated(when: str, evaluation: Evaluation) -> None:
            log(int(when) if when.isdecimal() else latest, named(VALID, evaluation))
            events.evaluated(when, evaluation)

        yield replace(events, step=step, evaluated=evaluated)


def named(group: str, values: Step | Evaluation) -> dict[str, float]:
    """The numbers among the values, by the names that a tracker shows."""
    return {
        f"{group}/{name}": float(value)
        for name, value in msgspec.to_builtins(values).items()
        if name != "step" and isinstance(value, int | float)
    }


def _library(name: str, extra: str) -> Any:
    """An optional library. Raises UsageError if it is not installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"--report-to {extra} needs {name}: pip install 'ondevice-tune[{extra}]', or leave it "
            "out"
        ) from None
