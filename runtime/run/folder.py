"""A run's directory: its files, and how a save becomes visible in one step.

    config.toml   plan.json   metrics.jsonl   evaluations.json   summary.json
    trajectory.jsonl   if the method logs its steps
    adapters.safetensors, adapter_config.json   an adapter for mlx-lm, that of the last save
    saves/step-N/   adapters, method.bin, state.json: all that resuming needs

A save is written beside its place, flushed, and renamed; older ones are removed after that. With
`--keep-best` the save with the lowest held-out loss stays, and the adapter is its at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.bundle.manifest import Manifest
from ondevice.documents import from_json
from ondevice.errors import BundleError, UsageError
from ondevice.files import fsync_path, read_file, storage_errors, write_atomic
from ondevice.paths import text_path
from runtime.data.hub import FOLDER
from runtime.data.run_rows import TOKENS
from runtime.methods.adapters import CONFIG as ADAPTER_CONFIG
from runtime.methods.adapters import WEIGHTS, Adapters, Tensors
from runtime.methods.protocol import Method
from runtime.run.trackers import OF_TRACKERS

CONFIG, PLAN, METRICS, SUMMARY = "config.toml", "plan.json", "metrics.jsonl", "summary.json"
TRAJECTORY, EVALUATIONS = "trajectory.jsonl", "evaluations.json"
LOCK = ".lock"
STATE, STATE_OF_METHOD = "state.json", "method.bin"
VERSION = 2  # of a save; since 2 AdamW's moments lie group by group


@dataclass(frozen=True)
class RunFolder:
    """The output directory of one training."""

    path: Path

    def __post_init__(self) -> None:
        text_path(self.path)  # config.toml holds it

    @property
    def saves(self) -> Path:
        return self.path / "saves"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def trajectory(self) -> Path:
        return self.path / TRAJECTORY

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
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            with storage_errors(self.path):
                self.saves.mkdir()
            yield

    def _check_free(self) -> None:
        if (self.path / CONFIG).exists():
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
        with storage_errors(self.path / LOCK):
            file = (self.path / LOCK).open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is training {self.path}") from None
            yield

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        write_atomic(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def save(
        self,
        step: int,
        adapters: Adapters,
        method: Method,
        keep: int = 1,
        best: int | None = None,
    ) -> None:
        """Save the state after `step` steps, from which `--resume` will continue.

        The latest `keep` saves stay, and that of step `best` if it is given.

        Raises:
            StorageError: the disk is full; the save before this one is intact.
        """
        method.settle()
        adapters.check_finite()
        place = self.place(step)
        if not place.exists():  # else what it holds is this state
            self._write(place, step, adapters, method)
        self._remove_old(keep, best)
        adapters.save(self.path)

    def publish(self, step: int) -> None:
        """Make the adapter of the save of `step` the run's.

        Raises:
            BundleError: the save is gone.
        """
        place = self.place(step)
        for name in (WEIGHTS, ADAPTER_CONFIG):
            if not (place / name).exists():
                raise BundleError(
                    f"{place / name} is gone, which --keep-best has saved; the adapters of the "
                    f"last step are in {self.path}"
                )
            temporary = self.path / f".{name}.partial"
            with storage_errors(self.path / name):
                shutil.copyfile(place / name, temporary)
                fsync_path(temporary)
                temporary.replace(self.path / name)
        fsync_path(self.path)

    def place(self, step: int) -> Path:
        """Where the save of a step is."""
        return self.saves / f"step-{step:08d}"

    @staticmethod
    def step_of(place: Path) -> int:
        """After how many steps a save was made, by its name.

        Raises:
            BundleError: it has another name.
        """
        number = place.name.removeprefix("step-")
        if not (number.isascii() and number.isdecimal()):
            raise BundleError(f"{place} is no save: its name is not step-NUMBER; remove it")
        return int(number)

    def _remove_old(self, keep: int, best: int | None) -> None:
        """Remove all saves but the latest and the best; none is ever seen half removed."""
        found = sorted(self.saves.glob("step-*"))
        stay = {*found[-keep:], *(() if best is None else (self.place(best),))}
        with storage_errors(self.saves):
            for old in found:
                if old not in stay:
                    old.rename(old.with_name(f".{old.name}.partial"))
            for old in self.saves.glob(".step-*.partial"):
                shutil.rmtree(old)

    def _write(self, place: Path, step: int, adapters: Adapters, method: Method) -> None:
        """Write a save under another name, and rename it."""
        partial = self.saves / f".{place.name}.partial"
        with storage_errors(place):
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
                adapters.save(partial)
                method.write(partial / STATE_OF_METHOD)
                names = (WEIGHTS, STATE_OF_METHOD)
                sums = {name: _sha256(partial / name) for name in names}
                state = {"version": VERSION, "step": step, "sha256": sums}
                write_atomic(partial / STATE, json.dumps(state).encode())
                fsync_path(partial)
                for log in (self.metrics, self.trajectory):
                    if log.exists():  # its lines are never fewer than the steps saved
                        fsync_path(log)
                partial.rename(place)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            fsync_path(self.saves)

    def evaluations(self, done: int) -> dict[str, Any]:
        """The evaluations up to the last save, by step."""
        path = self.path / EVALUATIONS
        if not path.exists():
            return {}
        return {
            when: facts
            for when, facts in read_json(path).items()
            if when in ("before", "after") or (when.isdecimal() and int(when) <= done)
        }

    def latest(self) -> Path | None:
        """The newest save; incomplete ones were never renamed into place."""
        found = sorted(self.saves.glob("step-*")) if self.saves.exists() else []
        return found[-1] if found else None

    def restore(
        self, manifest: Manifest, place: Path, into: Tensors | None = None
    ) -> tuple[int, Adapters]:
        """The step of a save, and its checked adapters in `into`.

        Raises:
            BundleError: the save is damaged, belongs to another bundle or is of another version.
        """
        try:
            state = dict(json.loads((place / STATE).read_bytes()))
            if (version := state.get("version", 1)) != VERSION:
                raise BundleError(
                    f"{place} is a save of version {version}, not {VERSION}: another version of "
                    f"ondevice wrote it; go on with that one, or train anew from its adapter "
                    f"(--adapter {self.path})"
                )
            step, sums = int(state["step"]), dict(state["sha256"])
            for name in (WEIGHTS, STATE_OF_METHOD):
                if _sha256(place / name) != sums[name]:
                    raise BundleError(f"{place / name} is altered: its SHA-256 differs")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise BundleError(f"{place} is damaged: {problem!r}") from None
        return step, Adapters.load(manifest, place, into)

    def truncate_metrics(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines of steps after `step`, and a half-written last line; returns the rest."""
        if not self.metrics.exists():
            return []
        kept, entries = [], []
        for line in self.metrics.read_text().splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                break  # the process died while it wrote this line; its step is run again
            for key in ("step", "processed_tokens"):
                if not isinstance(entry, dict) or not isinstance(entry.get(key), int):
                    raise BundleError(
                        f"{self.metrics} is damaged: a line holds no {key}; if another version of "
                        "ondevice wrote it, go on with that one, or train anew from its adapter "
                        f"(--adapter {self.path})"
                    )
            if entry["step"] <= step:
                kept.append(line)
                entries.append(entry)
        write_atomic(self.metrics, "".join(f"{line}\n" for line in kept).encode())
        return entries


def read_json(path: Path) -> dict[str, Any]:
    """A file of the run that holds one JSON object.

    Raises:
        BundleError: it is damaged.
    """
    try:
        found = from_json(read_file(path))
    except (OSError, ValueError) as problem:
        raise BundleError(f"{path} is damaged: {problem!r}") from None
    if not isinstance(found, dict):
        raise BundleError(f"{path} is damaged: it holds no object")
    return found


def _leftover(path: Path) -> bool:
    """Whether a file is of a run of ours that was killed before it began."""
    if path.name.startswith(FOLDER):
        return True
    if path.name == "saves":
        return path.is_dir() and not any(path.iterdir())
    ours = (*TOKENS, PLAN, LOCK, TRAJECTORY, *OF_TRACKERS)
    return path.name in ours or (path.name.startswith(".") and path.name.endswith(".partial"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
