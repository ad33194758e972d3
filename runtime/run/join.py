"""`ondevice train BUNDLE --parallel join=DIR`: a worker of a training, for as long as it is there.

It takes all but the bundle from the folder that the training's coordinator shares, follows the log,
and computes parts of steps (`runtime.parallel.fleet`). At the end it has the adapter itself.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from runtime.bundle.store import open_bundle
from runtime.core.documents import from_json
from runtime.core.errors import (
    BundleError,
    InterruptedRunError,
    StorageError,
    UsageError,
    WorkerError,
)
from runtime.core.notes import Note, warning
from runtime.core.signals import Stop, catching_signals, cause
from runtime.methods.log import descent_in, update_of
from runtime.methods.log_header import Header
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.parallel.fleet import REFUSED, Description, Guest, Task
from runtime.parallel.launch import host_name
from runtime.run.budget import check_budget
from runtime.run.folder import RunFolder
from runtime.run.start import remove_refused
from runtime.run.team import WORKERS, Team, of_bundle, require_same, versions
from runtime.run.trainer import Trainer
from runtime.run.worker import worker

LEFT = "this worker has left, and the training goes on; start it again, and it reads what it missed"
COORDINATOR, WORKER = "the coordinator", "this worker"
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a worker.

    steps: of the training. parts: in how many of them it has computed. output: the adapter.
    """

    steps: int
    parts: int
    output: str


def join(path: Path, output: Path, own: Mapping[str, Any], note: Note) -> Joined:
    """Help with the training of the folder `path` to its end; the adapter is written to `output`.

    `own` are settings of this worker's machine, the bundle among them.

    Raises:
        UsageError, BundleError: this worker has another bundle, another version, or other adapters.
        WorkerError: it computes otherwise than the coordinator.
        InterruptedRunError: it was told to leave.
    """
    guest, folder = Guest(path, host_name()), RunFolder(output)
    existed = folder.path.exists()
    with catching_signals() as stop, folder.created():
        try:
            with helper_of(guest, folder.path / WORKERS / guest.name, own, stop, note) as helper:
                while not helper.look():
                    pass
                helper.trainer.adapters.save(folder.path)
        except BaseException:
            remove_refused(folder, existed)
            raise
        shutil.rmtree(folder.path / WORKERS)
        folder.saves.folder.rmdir()
    return Joined(steps=helper.trainer.done, parts=helper.parts, output=str(output))


@contextmanager
def helper_of(
    guest: Guest, scratch: Path, own: Mapping[str, Any], stop: Stop, note: Note
) -> Iterator[Helper]:
    """A worker before the first step, with its files in the folder `scratch`; see `join`."""
    description = _received(guest, scratch, stop, note)
    facts = {**versions(), **of_bundle(open_bundle(own["bundle"]))}
    require_same(description.facts, facts, COORDINATOR, WORKER)
    with worker(scratch, own, Team()) as trainer:
        yield Helper(trainer, guest, description, stop, note)


def _received(guest: Guest, scratch: Path, stop: Stop, note: Note) -> Description:
    """Copy what the coordinator has shared, once it is all there."""
    note(f"looking for a training in {guest.folder.path}")
    while True:
        description = guest.met()
        files = {} if description is None else description.files
        if not all(map(_NAME.fullmatch, files)):
            raise BundleError(f"{sorted(files)} are not files of a training")
        missing = [name for name in files if not guest.folder.fetch(files[name], scratch / name)]
        if description is not None and not missing:
            return description
        _go_on(stop)
        guest.wait(f"whole files: {', '.join(missing)}" if missing else "a training", note)


class Helper:
    """A worker's way through the steps of a training."""

    def __init__(
        self, trainer: Trainer, guest: Guest, description: Description, stop: Stop, note: Note
    ) -> None:
        assert isinstance(trainer.method, ZerothOrder), "the coordinator refuses other methods"
        self.trainer, self.method, self.guest = trainer, trainer.method, guest
        self._description, self._stop, self._note = description, stop, note
        theirs, own = from_json(description.header), from_json(trainer.method.log_header())
        facts = [{f"the log's {name}": str(of[name]) for name in of} for of in (theirs, own)]
        require_same(facts[0], facts[1], COORDINATOR, WORKER)
        self._header = Header.of(theirs)
        self._descent = descent_in(self._header.more)
        self._verified = ""  # the session whose coordinator had the same adapters
        self._handled = ("", -1)  # the session and step whose task is done
        self.parts = 0

    def look(self) -> bool:
        """Do what is to be done now; returns whether the training is over."""
        trainer, guest = self.trainer, self.guest
        _go_on(self._stop)
        check_budget(trainer.meter, trainer.session.plan, LEFT)
        if (line := guest.line(trainer.done)) is not None:
            update = update_of(self._header, self._descent, trainer.done, line)
            self.method.follow(update)
            trainer.done += 1
            guest.went_on()
            return False
        task = guest.task(trainer.done)
        if task is not None and self._handled != (guest.folder.session, trainer.done):
            guest.went_on()
            return self._did(task)
        guest.wait(f"step {trainer.done + 1} or the end of the training", self._note)
        self._meet()
        return False

    def _did(self, task: Task) -> bool:
        """Do what a task says; returns whether the training is over."""
        guest, done = self.guest, self.trainer.done
        if (missed := done - self._handled[1] - 1) > 0:
            self._note(f"steps that it had missed, and has taken from the log: {missed}")
        self._handled = (guest.folder.session, done)
        if task.digest:
            self._verify(task.digest)
        if task.shares is None:
            return True
        first, end = task.shares.get(guest.name, (0, 0))
        if (first, end) == REFUSED:
            raise WorkerError(
                "this worker computes otherwise than the coordinator, which does not use its "
                "numbers; leave this machine out",
                differs=True,
            )
        try:
            if guest.name not in task.shares or self._verified != guest.folder.session:
                guest.ask()
            elif first < end:
                begun = time.monotonic()
                numbers = self.method.part(done, self.trainer.parts(), range(first, end))
                guest.answer(done, first, numbers, time.monotonic() - begun)
                self.parts += 1
        except StorageError as problem:
            self._note(warning(f"the coordinator does not hear of step {done + 1}: {problem}"))
        return False

    def _verify(self, digest: str) -> None:
        own = self.trainer.adapters.digest()
        if own != digest:
            raise WorkerError(
                f"the adapters after step {self.trainer.done} have the SHA-256 {digest} on "
                f"{COORDINATOR} and {own} on {WORKER}; start it again",
                differs=True,
            )
        self._verified = self.guest.folder.session

    def _meet(self) -> None:
        """Look whether the coordinator has started again, and still trains the same.

        Raises:
            UsageError: it does not.
        """
        now, before = self.guest.met(), self._description
        if now is not None and now.sha256 != before.sha256:
            raise UsageError(
                f"the training has changed: its description has the SHA-256 {now.sha256}, and was "
                f"{before.sha256} when this worker joined; start it again"
            )


def _go_on(stop: Stop) -> None:
    if stop.signal is not None:
        raise InterruptedRunError(f"{cause(stop.signal)}: {LEFT}")
