"""A run's directory: its files, and how a save becomes visible in one step.

    config.toml   plan.json   metrics.jsonl   evaluations.json   summary.json
    also-evaluated.json   the data of --also-evaluate, before training and after it
    speeds.json   those of the machines that share the work
    trajectory.jsonl   if the method logs its steps
    adapters.safetensors, adapter_config.json   an adapter for mlx-lm, that of the last save
    initial/           the adapters before the first step, if they do not follow from the seed
    saves/step-N/   adapters, method.bin, state.json: all that resuming needs
    weights.slots   in place of adapters, if all weights are trained
    checksums.json   of config.toml, plan.json, both evaluations, speeds, the adapter and the tokens

A save is written beside its place, flushed, and renamed; older ones are removed after that. With
`--keep-best` the save with the lowest held-out loss stays, and the adapter is its at the end.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.adapters.mlx_lm import CONFIG as ADAPTER_CONFIG
from runtime.adapters.mlx_lm import WEIGHTS
from runtime.config.base import load, read_values
from runtime.config.train import TrainConfig
from runtime.core.documents import from_json
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import flush_path, read_file, remove, storage_errors, write_atomic
from runtime.core.lookalikes import is_comparison
from runtime.core.paths import output_path, text_path
from runtime.core.typed import as_type
from runtime.core.version import __version__, of_another_version
from runtime.data.hub import FOLDER
from runtime.data.run_rows import is_tokens
from runtime.machine.backend import arithmetic
from runtime.methods.adapter_reader import AdapterFiles
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import TRAJECTORY, Method
from runtime.plan.plan import Plan
from runtime.run.lock import LOCK, RunLock
from runtime.run.results import Evaluation, When, read_steps
from runtime.run.team import WORKERS, Speeds
from runtime.run.trackers import OF_TRACKERS
from runtime.storage.checksums import CHECKSUMS, Checksums
from runtime.storage.logs import Log
from runtime.storage.saves import CONFIG, SAVES, SLOTS, Saves, State, another_run, other_ways

T = TypeVar("T")
D = TypeVar("D")
VERSION = 5  # of a run's files, which plan.json names; a save has one of its own
PLAN, METRICS = "plan.json", "metrics.jsonl"
EVALUATIONS, OTHER_EVALUATIONS = "evaluations.json", "also-evaluated.json"
SPEEDS = "speeds.json"
INITIAL = "initial"
STATE_OF_METHOD = "method.bin"
SAVED = (WEIGHTS, ADAPTER_CONFIG, STATE_OF_METHOD)
SAVED_WEIGHTS = (STATE_OF_METHOD,)  # where all weights are trained, beside the slots
CHECKED = (CONFIG, PLAN, EVALUATIONS, OTHER_EVALUATIONS, SPEEDS)  # beside the adapter and tokens


class RunFolder:
    """The output directory of one training."""

    is_first = True  # whether it is that of rank 0, which writes the run's files

    def __init__(self, path: Path) -> None:
        self.path = text_path(path)  # config.toml holds it
        self.lock = RunLock(path)
        self.saves = Saves(path)
        self.checksums = Checksums(path)
        self.metrics, self.trajectory = Log(path / METRICS), Log(path / TRAJECTORY)

    @contextmanager
    def created(self) -> Iterator[None]:
        """Create the directory, and lock it against other processes.

        Raises:
            UsageError: a run is there already, or another process has begun one.
        """
        self._check_free()
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self._check_free()  # another process may have been faster
            for path in self.path.iterdir():
                if path.name != LOCK:
                    remove(path)
            with storage_errors(self.path):
                self.saves.folder.mkdir()
            yield

    def remove_scratch_of_workers(self) -> None:
        """Remove what workers on this machine that were killed have left."""
        shutil.rmtree(self.path / WORKERS, ignore_errors=True)

    def write_initial(self, adapters: Adapters) -> None:
        """Write the adapters before the first step, from which the log is replayed."""
        with storage_errors(self.path):
            (self.path / INITIAL).mkdir(exist_ok=True)
        adapters.save(self.path / INITIAL)
        flush_path(self.path)

    def _check_free(self) -> None:
        output_path(self.path)
        if (self.path / CONFIG).exists() and not is_comparison(self.path):
            raise UsageError(
                f"{self.path} holds a run already; go on with it (ondevice train --resume "
                f"{self.path}) or choose another --output"
            )
        if self.path.exists():
            if not self.path.is_dir():
                raise UsageError(f"{self.path} is a file; choose another --output")
            if others := sorted(p.name for p in self.path.iterdir() if not _leftover(p)):
                raise UsageError(
                    f"{self.path} holds other files ({', '.join(others[:3])}); choose another "
                    "--output, or an empty folder"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against other processes.

        Raises:
            UsageError: another process is training it.
        """
        with self.lock.held():
            try:
                yield
            finally:
                for log in (self.metrics, self.trajectory):
                    log.close()

    def prepare_to_resume(self) -> None:
        """Remove files that a killed process has left half written.

        Raises:
            BundleError: the saves lie elsewhere, where nothing of ours may be removed.
        """
        if self.saves.folder.is_symlink():
            raise BundleError(f"{self.saves.folder} is a symbolic link: a run holds its own saves")
        with storage_errors(self.path):
            self.saves.folder.mkdir(exist_ok=True)
            for path in (*self.path.iterdir(), *self.saves.folder.iterdir()):
                if _half_written(path):
                    remove(path)

    def write(self, name: str, data: bytes) -> None:
        """Replace one of the run's files, and record its checksum if resuming reads it."""
        self.lock.check_there()
        if name not in CHECKED:
            write_atomic(self.path / name, data)
            return
        with self.checksums.replacing(name, hashlib.sha256(data).hexdigest()):
            write_atomic(self.path / name, data)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, with the version that all files of this run have."""
        self.write(PLAN, plan_bytes(plan))

    def plan(self) -> Plan:
        """The plan that the run was last executed with.

        Raises:
            BundleError: it is damaged, or another version of ondevice has written the run.
        """
        return read_plan(self.path / PLAN, other_ways(self.path))

    def config(self) -> TrainConfig:
        """The configuration that the run was last executed with.

        Raises:
            UsageError: it has options, or values, that this version does not take.
        """
        try:
            return load(TrainConfig, self.path / CONFIG, {})
        except UsageError as problem:
            raise UsageError(
                f"{self.path / CONFIG}: {problem}\nif another version of ondevice has written it, "
                f"{other_ways(self.path)}"
            ) from None

    def write_json(self, name: str, value: object) -> None:
        """Write a struct, or a dictionary of them."""
        facts = msgspec.to_builtins(value, str_keys=True)
        self.write(name, (json.dumps(facts, indent=1) + "\n").encode())

    def check(self, name: str) -> None:
        """Compare a file with the checksum that was recorded when it was written.

        Raises:
            BundleError: it is altered or gone.
        """
        again = f"put it back as it was, or {another_run(self.path, copy=True)}"
        made = "remove it, and it is made anew from the data, if these are what they were"
        self.checksums.check(name, made if is_tokens(name) else again)

    def start_logs(self, header: str | None) -> None:
        """Begin the logs; that of the method's steps only with a header for it."""
        self.metrics.start()
        if header is not None:
            self.trajectory.start(header.encode())

    def check_logs(self, state: State) -> float:
        """Check the part of each log that belongs to a save; returns the seconds of its steps.

        Raises:
            BundleError: a log is altered or too short.
        """
        way_out = self.saves.way_out(self.saves.place(state.step))
        for log in self._logs_of(state):
            log.check(state.logs[log.path.name], way_out)
        return sum(step.seconds for step in read_steps(self.metrics.path, state.step, way_out))

    def go_on_with_logs(self, state: State, keeps_log: bool) -> None:
        """Drop the lines of steps after the save from the logs.

        Raises:
            BundleError: the save is of a method that keeps other logs.
        """
        logs = self._logs_of(state)
        if logs != ([self.metrics, self.trajectory] if keeps_log else [self.metrics]):
            raise BundleError(
                f"{self.path}: its last save is of another method than its {CONFIG}; "
                f"{another_run(self.path)}"
            )
        for log in logs:
            log.go_on()

    def _logs_of(self, state: State) -> list[Log]:
        return [log for log in (self.metrics, self.trajectory) if log.path.name in state.logs]

    def save(
        self,
        step: int,
        adapters: Adapters | None,
        method: Method,
        keep: int = 1,
        best: int | None = None,
        evaluated: tuple[str, ...] = (),
    ) -> None:
        """Save the state after `step` steps, from which `--resume` will continue.

        Without `adapters` the weights themselves are trained, and lie in their own file. The latest
        `keep` saves stay, and that of step `best` if it is given. `evaluated` are the evaluations
        that were made before. Workers other than rank 0 only check the adapters.

        Raises:
            StorageError: the disk is full, or the run's folder is not where it was; the save before
                this one is intact.
        """
        if adapters is not None:
            method.settle()
            adapters.check_finite()
        if not self.is_first:
            return
        self.lock.check_there()
        place = self.saves.place(step)
        if not place.exists():  # else it holds this state already
            self._write(place, step, adapters, method, evaluated)
        self.publish(step)
        self.remove_old(keep, best)

    def publish(self, step: int) -> None:
        """Make the adapter of the save of `step` the run's.

        Raises:
            BundleError: the save is gone or altered.
        """
        self.lock.check_there()
        place = self.saves.place(step)
        if not place.exists():
            raise BundleError(
                f"{place} is gone, which --keep-best has saved; the adapters of the last step are "
                f"in {self.path}"
            )
        state = self.saves.read(place)
        for name in [file for file in (WEIGHTS, ADAPTER_CONFIG) if file in state.files]:
            self.saves.check(place, state, name)
            temporary = self.path / f".{name}.partial"
            with storage_errors(self.path / name):
                shutil.copyfile(place / name, temporary)
                flush_path(temporary)
                with self.checksums.replacing(name, state.files[name]):
                    temporary.replace(self.path / name)
        flush_path(self.path)

    def remove_old(self, keep: int, best: int | None) -> None:
        """Remove all saves but the latest and the best; none is ever seen half removed."""
        saves = self.saves.all()
        stay = {*saves[-keep:], *(() if best is None else (self.saves.place(best),))}
        with storage_errors(self.saves.folder):
            for old in saves:
                if old not in stay:
                    old.rename(old.with_name(f".{old.name}.partial"))
            for old in self.saves.folder.glob(".step-*.partial"):
                shutil.rmtree(old)

    def _write(
        self,
        place: Path,
        step: int,
        adapters: Adapters | None,
        method: Method,
        evaluated: tuple[str, ...],
    ) -> None:
        """Write a save under another name, and rename it."""
        logs = {log.path.name: log.sync() for log in (self.metrics, self.trajectory) if log.is_open}
        partial = place.with_name(f".{place.name}.partial")
        with storage_errors(place):
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir()  # not its parents: a folder that was removed stays so
                if adapters is not None:
                    adapters.save(partial)
                method.write(partial / STATE_OF_METHOD)
                names = SAVED_WEIGHTS if adapters is None else SAVED
                self.saves.write_state(partial, step, names, logs, evaluated, arithmetic())
                flush_path(partial)
                partial.rename(place)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            flush_path(self.saves.folder)

    def evaluations(self, done: int, evaluated: tuple[str, ...] = ()) -> dict[str, Evaluation]:
        """The evaluations up to step `done`, by step; `evaluated` must be among them.

        Raises:
            BundleError: the file is altered, or one is missing.
        """
        checked: dict[str, Evaluation] = self._checked(EVALUATIONS, dict[When, Evaluation], {})
        if missing := sorted(set(evaluated) - set(checked)):
            raise BundleError(
                f"{self.path / EVALUATIONS} lacks the evaluation {missing[0]!r}, which the last "
                f"save has; put it back as it was, or {another_run(self.path)}"
            )
        return {
            when: evaluation
            for when, evaluation in checked.items()
            if when == "before"
            or (evaluation.step == done if when == "after" else int(when) <= done)
        }

    def speeds(self) -> Speeds | None:
        """The speeds of the workers that have trained last; None before they are measured.

        Raises:
            BundleError: the file is altered.
        """
        return self._checked(SPEEDS, Speeds, None)

    def other_evaluations(self) -> dict[str, dict[str, Evaluation]]:
        """The evaluations of other data, by the data and when they were made.

        Raises:
            BundleError: the file is altered.
        """
        return self._checked(OTHER_EVALUATIONS, dict[str, dict[str, Evaluation]], {})

    def _checked(self, name: str, kind: type[T], absent: D) -> T | D:
        """The content of a file that has a checksum; `absent` where there is no file."""
        path = self.path / name
        if not path.exists():
            return absent
        self.check(name)
        try:
            return as_type(read_json(path), kind)
        except ValueError as problem:
            raise BundleError(f"{path} is damaged: {problem}") from None

    @property
    def token_files(self) -> list[str]:
        """The files of tokens that are there."""
        return sorted(path.name for path in self.path.iterdir() if is_tokens(path.name))

    def check_save(self, place: Path) -> State:
        """The state of a save, whose files agree with their checksums.

        Raises:
            BundleError: the save is damaged, or is of another version.
        """
        state = self.saves.read(place)
        if set(state.files) not in (set(SAVED), set(SAVED_WEIGHTS)):
            raise BundleError(f"{place} is no save: it has checksums of other files")
        for name in state.files:
            self.saves.check(place, state, name)
        return state


class WorkerFolder(RunFolder):
    """The folder of a worker other than rank 0: scratch files and logs, and no saves of its own."""

    is_first = False

    def publish(self, step: int) -> None:
        """Nothing: rank 0 does it."""

    def write(self, name: str, data: bytes) -> None:
        """Nothing: rank 0 does it."""

    def write_initial(self, adapters: Adapters) -> None:
        """Nothing: rank 0 does it."""


def plan_bytes(plan: Plan) -> bytes:
    """The content of plan.json."""
    stamps = {"version": VERSION, "written_by": f"ondevice {__version__}"}
    return (json.dumps({**stamps, **plan.to_json()}, indent=1) + "\n").encode()


def read_plan(path: Path, way_out: str) -> Plan:
    """The plan in a plan.json; `way_out` is for one that another version has written.

    Raises:
        BundleError: it is damaged, or of another version.
    """
    facts = read_json(path)
    stamp, writer = facts.pop("version", None), facts.pop("written_by", None)
    if other := of_another_version(stamp, VERSION, way_out, writer):
        raise BundleError(f"{path}: {other}")
    try:
        return as_type(facts, Plan)
    except ValueError as problem:
        raise BundleError(f"{path} is damaged: {problem}; {way_out}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file of the run that holds one JSON object.

    Raises:
        BundleError: it is damaged.
    """
    try:
        value = from_json(read_file(path))
    except (OSError, ValueError) as problem:
        raise BundleError(f"{path} is damaged: {problem!r}") from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} is damaged: it holds no object")
    return value


def _half_written(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def _leftover(path: Path) -> bool:
    """Whether a file is of a run of ours that was killed before it began."""
    if path.name.startswith(FOLDER):
        return True
    if path.name == "saves":
        return path.is_dir() and not any(path.iterdir())
    if path.name == INITIAL:
        files = (WEIGHTS, ADAPTER_CONFIG, f".{WEIGHTS}.partial")
        return path.is_dir() and all(
            file.name in files or _half_written(file) for file in path.iterdir()
        )
    ours = (PLAN, LOCK, METRICS, TRAJECTORY, CHECKSUMS, SLOTS, *OF_TRACKERS)
    return path.name in ours or is_tokens(path.name) or _half_written(path)


def bundle_of(path: Path) -> str:
    """The path of the bundle from which the run in `path`, or of a save there, was trained.

    Raises:
        UsageError: there is no run that names a bundle, or it holds no adapter.
        BundleError: there is no adapter, or the run is altered.
    """
    path = AdapterFiles.at(path).weights
    folder = path.absolute().parent
    run = folder.parent.parent if folder.parent.name == SAVES else folder
    if not (run / CONFIG).exists():
        raise UsageError(
            f"{path} is in no run, whose {CONFIG} would name the bundle of its model; give "
            "--bundle BUNDLE"
        )
    RunFolder(run).check(CONFIG)
    bundle = read_values(run / CONFIG).get("bundle")
    if not isinstance(bundle, str) or not Path(bundle).exists():
        raise UsageError(
            f"{bundle}, the bundle that {run} was trained from, is not there; if it was moved, "
            "give --bundle BUNDLE"
        )
    return bundle
