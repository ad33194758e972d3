"""Workers of a zeroth-order training that come and go, through a folder that they share.

A step is a few numbers: one for each group of rows at each of the method's points, here its items.
The coordinator has the run. For each step it writes a task: who computes which items, and the line
of the step before in the run's log. It computes its own, collects those of the others, and computes
what has not come in time. Whose numbers come from where changes no bit of the update.

A worker starts from the run's first adapters and applies the lines of the log, wherever it was
when they were written. So one that was away only has to read what it missed (as in FedKSeed, arXiv
2312.06353). It is given items once its adapters have the SHA-256 of the coordinator's. The first
numbers that it sends are computed again, and compared.

    run                 a `Description`, with the name of the coordinator's session
    file-SHA256         a file that workers need to start
    FIRST.log           lines of the log, from step FIRST on
    STEP.step           a `Task`; its line is that of step STEP - 1
    NAME.here           a worker is at the latest step, and asks for items
    STEP-NAME.part      the numbers of a worker's items
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime.core.documents import from_json
from runtime.core.errors import StorageError, UsageError, WorkerError
from runtime.core.notes import Note, silent, warning
from runtime.parallel.shared_folder import SharedFolder, pause
from runtime.parallel.workers import AGREE_STEPS, shares

LINES = 100  # of a file of the log; until there are so many, they are in the tasks
FIRST_PATIENCE_S, LEAST_PATIENCE_S = 30.0, 5.0  # for the first numbers of a worker, and later
SILENT_S = 30.0  # after which a worker says that it waits
PATIENCE = 3.0  # times as long as it has taken before, or the coordinator takes
SLOW = 1e-9  # items per second of a worker that has sent none yet, and a least time in s
RUN, LOG, TASK, HERE, PART = "run", ".log", ".step", ".here", ".part"
REFUSED = (-1, -1)  # in place of the items of a worker whose numbers were others
_OURS = re.compile(
    r"run|file-\w{16}|\d{8}\.(step|log)|\w{1,32}\.here|\d{8}-\w{1,32}\.part", re.ASCII
)

Numbers = list[list[float]]  # of items
Compute = Callable[[Sequence[int]], Numbers]


class Description(msgspec.Struct, frozen=True):
    """The training that a folder is for.

    facts: what all workers must have alike. header: the first line of the log. files: their
    SHA-256. session: changes whenever the coordinator starts.
    """

    facts: dict[str, str]
    header: str
    files: dict[str, str]
    session: str = ""

    @property
    def sha256(self) -> str:
        """Of all but the session."""
        plain = msgspec.structs.replace(self, session="")
        return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


class Task(NamedTuple):
    """The work of a step: each worker's items, from the first and before the second number.

    shares: None once the training is over. digest: the SHA-256 of the adapters, where workers are
    to compare theirs. line: of the step before in the log, None before the first.
    """

    shares: Mapping[str, Sequence[int]] | None
    digest: str = ""
    line: list[Any] | None = None


@dataclass
class Member:
    """A worker, as the coordinator knows it, or the coordinator itself.

    speed: in items per second; a new worker is given one item. latest_s: until its latest numbers
    came. proven: whether its first numbers were right.
    """

    speed: float = SLOW
    latest_s: float = 0.0
    proven: bool = False

    def measured(self, seconds: float, items: int) -> None:
        """Take note of how long it has computed."""
        if items:
            latest = items / max(seconds, SLOW)
            self.speed = latest if self.speed == SLOW else (self.speed + latest) / 2


@dataclass
class Fleet:
    """The coordinator's side.

    digest: the SHA-256 of the adapters after the latest step. hurry: whether nobody is to be waited
    for any more.
    """

    path: Path
    digest: Callable[[], str] = lambda: ""
    hurry: Callable[[], bool] = lambda: False
    _note: Note = silent
    _lines: list[str] = field(default_factory=list)
    _kept: int = 0  # lines that are in files of the log
    _members: dict[str, Member] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    _own: Member = field(default_factory=Member)
    _told: int = 0  # of ignored files
    _unwritten: bool = False  # the latest task
    _steps: int = 0
    _items: tuple[int, int] = (0, 0)  # whose numbers came from workers, and all

    def __post_init__(self) -> None:
        self._folder = SharedFolder(self.path)

    def begin(
        self,
        facts: Mapping[str, str],
        files: Mapping[str, Path | bytes],
        log: Sequence[str],
        note: Note,
    ) -> None:
        """Describe the training; `files` are what workers need to start, `log` its lines.

        Raises:
            StorageError: the folder cannot be written.
            UsageError: it is another training's.
        """
        header, *self._lines = log
        self._note = note
        before = described(self.path)
        if before is not None and before.header != header:
            raise UsageError(
                f"{self.path} is the folder of another training, whose log begins with the SHA-256 "
                f"{_sha256(before.header)}, not {_sha256(header)}; give another folder, or empty it"
            )
        sums = {name: self._folder.put(file) for name, file in files.items()}
        for name in self._folder.names():
            if name.endswith((LOG, TASK, HERE, PART)) and _OURS.fullmatch(name):
                self._folder.remove(name)
        self._folder.session = secrets.token_hex(4)
        self._keep()
        description = Description(dict(facts), header, sums, self._folder.session)
        SharedFolder(self.path).write(RUN, msgspec.json.encode(description))
        self._folder.nbytes = 0

    def learned(self, line: str) -> None:
        """Take the line of a step, which its log now has."""
        self._lines.append(line)

    def share(self, step: int, lengths: Sequence[int], compute: Compute) -> Numbers:
        """The numbers of all items of a step, of which each has as many as `lengths` says.

        `compute` computes those of some items, in their order.

        Raises:
            WorkerError: another training, or this one elsewhere, has begun in the folder.
        """
        now = described(self.path) if step % AGREE_STEPS == 0 else None
        if now is not None and now.session != self._folder.session:
            raise WorkerError(
                f"{self.path} now has the messages of another process that trains, begun later "
                "than this one; give this one another folder, or none"
            )
        came = self._admit(step)
        speeds = [member.speed for member in (self._own, *self._members.values())]
        mine, *others = shares(len(lengths), speeds)
        of_members = dict(zip(self._members, others, strict=True))
        told = {name: (each.start, each.stop) for name, each in of_members.items()}
        due = came or (told and step % AGREE_STEPS == 0)
        told |= dict.fromkeys(self._refused, REFUSED)
        self._post(step, told, self.digest() if due else "")
        begun = time.monotonic()
        numbers = dict(zip(mine, compute(mine), strict=True))
        self._own.measured(time.monotonic() - begun, len(mine))
        received = self._received(step, of_members, lengths, begun)
        numbers |= self._checked(received, numbers, len(lengths), compute)
        came_back, all_items = self._items
        self._items = came_back + sum(map(len, received.values())), all_items + len(lengths)
        self._steps += 1
        return [numbers[item] for item in range(len(lengths))]

    def end(self) -> None:
        """Tell all workers that the training is over."""
        self._admit(len(self._lines))
        self._post(len(self._lines), None, self.digest())
        if self._unwritten:
            again = f"once they can see it: --resume RUN --parallel folder={self.path}"
            self._note(warning(f"workers do not know that the training is over; tell them {again}"))
        if self._steps:
            self._note(
                f"workers computed {self._items[0]} of {self._items[1]} parts of {self._steps} "
                f"steps; a step took {self._folder.nbytes / self._steps:.0f} bytes in {self.path}"
            )

    def _keep(self) -> None:
        """Write the lines that are in no file of the log. Raises StorageError."""
        for first in range(self._kept, len(self._lines), LINES):
            lines = "".join(self._lines[first : first + LINES])
            self._folder.write(f"{first:08d}{LOG}", lines.encode())
        self._kept = len(self._lines) // LINES * LINES

    def _post(self, step: int, told: Mapping[str, Sequence[int]] | None, digest: str) -> None:
        line = self._lines[-1] if self._lines else "null"
        task = f'[{json.dumps(told, separators=(",", ":"))},"{digest}",{line.strip()}]'
        try:  # only workers need it, without whom the training goes on
            if self._unwritten or len(self._lines) - self._kept >= LINES:
                self._keep()  # with the lines of tasks that could not be written
            self._folder.write(f"{step:08d}{TASK}", task.encode())
            self._unwritten = False
        except StorageError as problem:
            if not self._unwritten:
                self._note(warning(f"workers wait until the folder can be written: {problem}"))
            self._unwritten = True

    def _admit(self, step: int) -> bool:
        """Take in those who ask for items; returns whether there are any."""
        came = False
        for name in self._folder.names():
            if not _OURS.fullmatch(name):
                self._folder.ignored.add(name)
            elif name.endswith(PART) and int(name[:8]) < step:
                self._folder.remove(name)  # it came too late, or was read
            elif name.endswith(TASK) and int(name[:8]) < self._kept:
                self._folder.remove(name)  # its line is in a file of the log
            elif name.endswith(HERE) and self._folder.read(name) is not None:
                self._folder.remove(name)
                who = name.removesuffix(HERE)
                came = came or who not in self._refused
                if who not in (*self._refused, *self._members):
                    self._members[who] = Member()
                    self._note(f"the worker {who} takes part from step {step + 1} on")
        if len(self._folder.ignored) > self._told:
            self._told = len(self._folder.ignored)
            latest = sorted(self._folder.ignored)[-1]
            self._note(
                f"files in {self.path} that are no whole messages of this session are ignored: "
                f"{self._told}, such as {latest!r:.80}"
            )
        return came

    def _received(
        self, step: int, of_members: Mapping[str, range], lengths: Sequence[int], begun: float
    ) -> dict[str, dict[int, list[float]]]:
        """The numbers of each worker's items; whoever does not send them in time has left."""
        waiting = {name: items for name, items in of_members.items() if items}
        own_s = time.monotonic() - begun
        received: dict[str, dict[int, list[float]]] = {}
        while waiting:
            passed = time.monotonic() - begun
            for name, items in [*waiting.items()]:
                member = self._members[name]
                least_s = LEAST_PATIENCE_S if member.latest_s else FIRST_PATIENCE_S
                patience_s = max(least_s, PATIENCE * max(own_s, member.latest_s))
                answer = self._answer(f"{step:08d}-{name}{PART}", items, lengths)
                if answer is not None:
                    seconds, received[name] = answer
                    member.measured(seconds, len(items))
                    member.latest_s = min(passed, patience_s)  # this process may have been stopped
                elif passed > patience_s:
                    self._note(f"the worker {name} has left: no numbers in {passed:.1f} s")
                    del self._members[name]
                elif not self.hurry():
                    continue
                del waiting[name]
            if waiting:
                pause(passed)
        return received

    def _answer(
        self, name: str, items: range, lengths: Sequence[int]
    ) -> tuple[float, dict[int, list[float]]] | None:
        """The seconds that a worker has computed, and its numbers; None if they are not there."""
        content = self._folder.read(name)
        if content is None:
            return None
        form = f"<dI{sum(lengths[item] for item in items)}d"
        if struct.calcsize(form) == len(content):
            seconds, first, *values = struct.unpack(form, content)
            left = iter(values)
            if first == items.start:
                return seconds, {item: [*islice(left, lengths[item])] for item in items}
        self._folder.ignored.add(name)
        return None

    def _checked(
        self,
        received: Mapping[str, dict[int, list[float]]],
        own: Mapping[int, list[float]],
        count: int,
        compute: Compute,
    ) -> dict[int, list[float]]:
        """The numbers of the others' items; what is missing, or of new workers, is computed."""
        numbers = {item: each for of in received.values() for item, each in of.items()}
        new = [name for name in received if not self._members[name].proven]
        missing = set(range(count)) - numbers.keys() - own.keys()
        again = sorted(missing.union(*(received[name] for name in new)))
        computed = dict(zip(again, compute(again), strict=True)) if again else {}
        for name in new:
            same = all(
                _bits(each) == _bits(computed[item]) for item, each in received[name].items()
            )
            self._members[name].proven = same
            if not same:
                self._note(warning(f"the worker {name} computes otherwise, and is not used"))
                self._refused.add(name)
                del self._members[name]
        return numbers | computed


class Guest:
    """A worker's side: the messages that it reads and writes."""

    def __init__(self, path: Path, host: str) -> None:
        self.folder = SharedFolder(path)
        self.name = f"{re.sub('[^A-Za-z0-9]', '', host)[:12]}_{secrets.token_hex(2)}"
        self._log: tuple[int, list[str]] = 0, []  # lines from a step on
        self.went_on()

    def met(self) -> Description | None:
        """The training of the folder, if it is there; from now on messages are of its session."""
        description = described(self.folder.path)
        if description is not None and description.session != self.folder.session:
            self.folder.session, self._log = description.session, (0, [])
        return description

    def line(self, step: int) -> str | None:
        """The line of a step in the log, counted from 0; None if it is not there yet."""
        first, lines = self._log
        if 0 <= step - first < len(lines):
            return lines[step - first]
        if (task := self.task(step + 1)) is not None and task.line is not None:
            return json.dumps(task.line)
        first = step // LINES * LINES
        content = self.folder.read(f"{first:08d}{LOG}") or b""
        self._log = first, content.decode().splitlines()
        return self._log[1][step - first] if step - first < len(self._log[1]) else None

    def task(self, step: int) -> Task | None:
        """The task of a step; None if it is not there yet."""
        content = self.folder.read(f"{step:08d}{TASK}")
        return None if content is None else Task(*from_json(content))

    def ask(self) -> None:
        """Ask for items, with the adapters of the latest step at hand. Raises StorageError."""
        self.folder.write(f"{self.name}{HERE}", b"")

    def answer(self, step: int, first: int, numbers: Sequence[float], seconds: float) -> None:
        """Send the numbers of the items from `first` on. Raises StorageError."""
        content = struct.pack(f"<dI{len(numbers)}d", seconds, first, *numbers)
        self.folder.write(f"{step:08d}-{self.name}{PART}", content)

    def went_on(self) -> None:
        """Something has happened, and more may follow soon."""
        self._since, self._silent_s = time.monotonic(), SILENT_S

    def wait(self, missing: str, note: Note) -> None:
        """Wait before the next look, the longer the less has happened; say so after long."""
        waited_s = time.monotonic() - self._since
        if waited_s > self._silent_s:
            self._silent_s = 2 * waited_s
            note(f"nothing new in {self.folder.path} for {waited_s:.0f} s: waiting for {missing}")
        pause(waited_s)


def described(path: Path) -> Description | None:
    """The training that a folder is for; None if it is for none, or that is not visible yet."""
    content = SharedFolder(path).read(RUN)
    try:
        return None if content is None else msgspec.json.decode(content, type=Description)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)
