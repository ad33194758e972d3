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
from typing import Any, Protocol

import msgspec

from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.core.files import write_atomic
from runtime.run.results import Evaluation, Events, Step

TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"
OF_TRACKERS = (TENSORBOARD, WANDB_ID, "wandb")  # files of trackers in a run's folder
PROJECT = "ondevice"  # of Weights & Biases, if the environment names none
TRAIN, VALID = "train", "valid"


class Tracker(Protocol):
    """Something that keeps values by name and step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        writer = _library("tensorboardX", "tensorboard").SummaryWriter
        # values of later steps, from an earlier process, are written again
        self._writer = writer(str(folder / TENSORBOARD), purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # before the step may be saved: a killed run has no gap

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; its environment variables say where it goes.

    Steps that are trained again after a kill are logged again: values stand against the metric
    `step`, so that they lie over the earlier ones.
    """

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        wandb = _library("wandb", "wandb")
        file = folder / WANDB_ID
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex[:8].encode())
        try:
            self._run = wandb.init(
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
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[TrainConfig, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


@contextmanager
def reporting(config: TrainConfig, folder: Path, done: int, events: Events) -> Iterator[Events]:
    """The events of a run, which are also sent to the tracker that it asks for.

    done: the steps of the run so far.

    Raises:
        UsageError: the tracker is not installed, or cannot be reported to.
    """
    make = TRACKERS.get(config.report_to)
    if make is None:
        yield events
        return
    tracker, latest, failed = make(config, folder, done), done, True

    def step(done: Step, total: int) -> None:
        nonlocal latest
        latest = done.number
        tracker.log(latest, named(TRAIN, done))
        events.step(done, total)

    def evaluated(when: str, evaluation: Evaluation) -> None:
        tracker.log(int(when) if when.isdecimal() else latest, named(VALID, evaluation))
        events.evaluated(when, evaluation)

    try:
        yield replace(events, step=step, evaluated=evaluated)
        failed = False
    finally:
        tracker.close(failed)


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
