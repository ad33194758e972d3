"""The saves of a run: where they lie, and the checksums that whoever reads one compares.

saves/step-N/state.json   the step, the SHA-256 of the save's other files, and how far each log
                          of the run had come, with the SHA-256 of that; it holds one of itself
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from runtime.core.documents import from_toml
from runtime.core.errors import BundleError
from runtime.core.files import read_file, reading_errors, require_file, sha256_file, write_atomic
from runtime.core.typed import decoded
from runtime.core.version import of_another_version
from runtime.storage.checksums import CHECKSUMS, Checksums
from runtime.storage.logs import Prefix

CONFIG, SAVES, STATE, SUMMARY = "config.toml", "saves", "state.json", "summary.json"
SLOTS = "weights.slots"  # of a run that trains all parameters
VERSION = 3  # since 3 a save holds checksums of itself and of the logs


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of state.json.

    files: the SHA-256 of each other file of the save. logs: the beginning of each log that belongs
    to the steps done. evaluated: the evaluations made before it, as evaluations.json names them.
    arithmetic: what decided the last bits, as `runtime.machine.backend` names it. sha256: of
    all this.
    """

    version: int
    step: int
    files: dict[str, str]
    logs: dict[str, Prefix]
    evaluated: tuple[str, ...]
    arithmetic: dict[str, str]
    sha256: str = ""

    def encode(self) -> bytes:
        """The content of state.json, with its own checksum."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, sha256=""))
        sha256 = hashlib.sha256(plain).hexdigest()
        return msgspec.json.encode(msgspec.structs.replace(self, sha256=sha256)) + b"\n"

    def other_arithmetic(self, here: Mapping[str, str]) -> str:
        """The facts of `here` that were others in this save; empty if none was."""
        return ", ".join(
            f"{name} is {here.get(name, 'none')}, not {before}"
            for name, before in self.arithmetic.items()
            if here.get(name) != before
        )


class _Stamped(msgspec.Struct):
    version: int


def another_run(run: Path, copy: bool = False) -> str:
    """How to train the result of a run further, without resuming it; `copy` if it is altered."""
    if (run / SLOTS).exists():
        return (
            f"train the model that ondevice replay {run} --output BUNDLE writes from the log of "
            "its steps"
        )
    if copy:
        return (
            "start another run with --adapter COPY, from a copy of adapters.safetensors and "
            f"adapter_config.json of {run}"
        )
    return f"start another run with --adapter {run}"


def unfinished(run: Path) -> str:
    """At which step of how many a run stands that has no summary yet; empty for all else."""
    if (run / SUMMARY).exists() or not ((run / CONFIG).exists() and (run / SAVES).is_dir()):
        return ""
    saves = Saves(run)
    latest = saves.latest()
    step = 0 if latest is None else saves.step_of(latest)
    return f"{run} is not finished: its last save is of step {step} of {_steps_of(run)}"


def _steps_of(run: Path) -> str:
    try:
        return str(from_toml(read_file(run / CONFIG)).get("steps", "?"))
    except ValueError:  # whoever resumes the run is told
        return "?"


def other_ways(run: Path, copy: bool = False) -> str:
    """How to train the result of a run further that another version of ondevice has written."""
    return f"go on with that version, or {another_run(run, copy)}"


@dataclass(frozen=True)
class Saves:
    """The saves in the folder of a run."""

    run: Path

    @property
    def folder(self) -> Path:
        return self.run / SAVES

    def place(self, step: int) -> Path:
        """Where the save of a step is."""
        return self.folder / f"step-{step:08d}"

    def all(self) -> list[Path]:
        """The places of all whole saves, the newest last; others were never renamed into place.

        Raises:
            BundleError: one has a name that no save has.
        """
        return sorted(self.folder.glob("step-*"), key=self.step_of)

    def latest(self) -> Path | None:
        """The place of the newest save."""
        return next(reversed(self.all()), None)

    def step_of(self, place: Path) -> int:
        """After how many steps a save was made, by its name.

        Raises:
            BundleError: it has another name.
        """
        number = place.name.removeprefix("step-")
        if number.isascii() and number.isdecimal() and len(number) < 20:
            step = int(number)
            if place.name == self.place(step).name:
                return step
        raise BundleError(f"{place} is no save: its name is not that of a step; remove it")

    def write_state(
        self,
        folder: Path,
        step: int,
        names: tuple[str, ...],
        logs: Mapping[str, Prefix],
        evaluated: tuple[str, ...],
        arithmetic: Mapping[str, str],
    ) -> None:
        """Write the state.json of a save whose other files lie in `folder`."""
        files = {name: sha256_file(folder / name) for name in names}
        state = State(VERSION, step, files, dict(logs), evaluated, dict(arithmetic))
        write_atomic(folder / STATE, state.encode())

    def read(self, place: Path) -> State:
        """The content of the state.json of a save.

        Raises:
            BundleError: it is damaged, of another step or version.
        """
        path = place / STATE
        if not path.exists():
            raise BundleError(f"{path} is gone; {self.way_out(place)}")
        with reading_errors(path):
            data = read_file(path)
        try:
            stamp = decoded(data, _Stamped).version
            if other := of_another_version(stamp, VERSION, other_ways(self.run, copy=True)):
                raise BundleError(f"{path}: {other}")
            state = decoded(data, State)
        except ValueError as problem:
            raise BundleError(f"{path} is damaged: {problem}; {self.way_out(place)}") from None
        if data != state.encode():
            raise BundleError(
                f"{path} is altered: it does not agree with its own SHA-256; {self.way_out(place)}"
            )
        if state.step != self.step_of(place):
            raise BundleError(
                f"{path} is that of step {state.step}, and its folder is {place.name}; "
                f"{self.way_out(place)}"
            )
        return state

    def check(self, place: Path, state: State, name: str) -> None:
        """Compare a file of a save with its checksum.

        Raises:
            BundleError: it is altered or gone.
        """
        path = place / name
        if not path.exists():
            raise BundleError(f"{path} is gone; {self.way_out(place)}")
        with reading_errors(path):
            require_file(path)
            sha256 = sha256_file(path)
        if sha256 != state.files.get(name):
            raise BundleError(
                f"{path} is altered: its SHA-256 is not the one in {STATE}; {self.way_out(place)}"
            )

    def way_out(self, place: Path) -> str:
        """The way out where the save in `place` cannot be used."""
        step = self.step_of(place)
        earlier = [save for save in self.all() if self.step_of(save) < step]
        if earlier:
            return (
                f"to go on from {earlier[-1].name}, remove {place} and give ondevice train "
                f"--resume {self.run}"
            )
        return (
            "no earlier save is left (--keep N keeps more); to train anew with the same settings, "
            f"give ondevice train --config {self.run / CONFIG} --output OTHER"
        )


def check_adapter(path: Path) -> None:
    """Compare a file of an adapter with the checksum that its run, or its save, has of it.

    A folder that is neither, such as a copy of an adapter, has no checksums.

    Raises:
        BundleError: the file is altered.
    """
    folder = path.absolute().parent
    in_save = folder.parent.name == SAVES and folder.name.startswith("step-")
    if in_save and ((folder / STATE).exists() or (folder.parent.parent / CONFIG).exists()):
        saves = Saves(folder.parent.parent)
        saves.check(folder, saves.read(folder), path.name)
    elif (folder / CHECKSUMS).exists() or (
        (folder / SAVES).is_dir() and (folder / CONFIG).exists()
    ):
        Checksums(folder).check(
            path.name,
            "a copy of both files of the adapter in another folder is used as it is; ondevice "
            f"train --resume {folder} writes it again from its last save, if that is whole",
        )
