"""Devices that come and go train as one worker alone, bit for bit, through a folder they share.

The coordinator and its workers take turns in this process: workers look at the folder after each of
the coordinator's steps, and whenever it waits for numbers, by a clock that only waiting moves.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bundles import Tiny
from support.files import listing
from support.runs import adapter, metrics_of, refuses, train_arguments
from support.shared import Shared

from runtime.bundle.store import open_bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import InterruptedRunError, OnDeviceError, UsageError, WorkerError
from runtime.core.signals import Stop
from runtime.methods.adapters import Adapters
from runtime.parallel import fleet, shared_folder
from runtime.parallel.fleet import RUN, Guest
from runtime.parallel.shared_folder import SharedFolder
from runtime.parallel.workers import AGREE_STEPS
from runtime.run import resume, start
from runtime.run.join import Helper, helper_of
from runtime.run.results import Events, Step, TrainResult

STEPS = 26
OPTIONS: dict[str, Any] = {
    **{"data": "random:5", "max_seq_length": 16, "batch_size": 2, "budget": "400MB"},
    **{"method": "mezo", "learning_rate": 1e-2, "lr_schedule": "constant", "save_every": 3},
}
Happens = Callable[[int], object]  # after a step, counted from 1


class Killed(BaseException):
    """The coordinator's process is killed."""


class Device:
    """A worker, which looks at the folder while it is there."""

    def __init__(self, folder: Path, bundle: Path, scratch: Path, name: str = "device") -> None:
        self.notes: list[str] = []
        self.there, self.over, self.gone = True, False, False
        self.waited, self.error = False, ""
        own = {"bundle": str(bundle), "machine": None}
        self._left = ExitStack()
        guest = Guest(folder, name)
        helping = helper_of(guest, scratch / guest.name, own, Stop(), self.notes.append)
        self.helper: Helper = self._left.enter_context(helping)

    def look(self) -> None:
        """Do all that is to be done by what is visible."""
        self.waited = False
        while self.there and not (self.over or self.waited):
            try:
                self.over = self.helper.look()
            except OnDeviceError as error:
                self.there, self.error = False, str(error)

    @property
    def digest(self) -> str:
        return self.helper.trainer.adapters.digest()

    def killed(self) -> None:
        self.there, self.gone = False, True
        self._left.close()


class Stage:
    """The folder, the devices, and the clock of a training; `at` is called after each step."""

    def __init__(self, bundle: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundle, self.path, self.folder = bundle, path, path / "shared"
        self.folder.mkdir()
        self.devices: list[Device] = []
        self.notes: list[str] = []
        self.now = 0.0
        self.turn: Device | None = None  # who looks at the folder; else the coordinator
        monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=self._moment))
        monkeypatch.setattr(fleet, "pause", self._wait)

    @property
    def run(self) -> Path:
        return self.path / "run"

    def join(self, bundle: Path | None = None) -> Device:
        self.devices.append(Device(self.folder, bundle or self.bundle, self.path))
        return self.devices[-1]

    def trains(self, at: Happens, steps: int, **more: Any) -> TrainResult:
        given = {**OPTIONS, "parallel": f"folder={self.folder}", "output": self.run, **more}
        config = TrainConfig(bundle=str(self.bundle), steps=steps, **given)
        return start.train(config, self._events(at))

    def resumes(self, at: Happens) -> TrainResult:
        wanted = {"parallel": f"folder={self.folder}"}
        return resume.resume(self.run, self._events(at), wanted)

    def _events(self, at: Happens) -> Events:
        def after(step: Step, steps: int) -> None:
            at(step.number)
            self.look()

        return Events(note=self.notes.append, step=after)

    def _moment(self) -> float:
        self.now += 0.01
        return self.now

    def _wait(self, waited_s: float) -> None:
        if self.turn is None:
            self.now += 1.0
            self.look()
        else:
            self.turn.waited = True

    def look(self) -> None:
        for device in self.devices:
            self.turn = device
            device.look()
        self.turn = None

    def said(self, text: str) -> int:
        return sum(text in note for note in self.notes)

    def check(self, alone: Path) -> None:
        """The run and the devices that stayed did as one worker alone did, at least so far."""
        self.look()
        steps = len(metrics_of(self.run))
        logs = [
            (run / "trajectory.jsonl").read_text().splitlines()[: steps + 1]
            for run in (self.run, alone)
        ]
        assert logs[0] == logs[1] and len(logs[0]) == steps + 1
        losses = [[step["loss"] for step in metrics_of(run)[:steps]] for run in (self.run, alone)]
        assert losses[0] == losses[1]
        if steps == len(metrics_of(alone)):
            assert adapter(self.run) == adapter(alone)
        stayed = [device for device in self.devices if device.there]
        assert all(device.over for device in stayed)
        manifest = open_bundle(str(self.bundle)).manifest
        digest = Adapters.load(manifest, self.run).digest()
        assert all(device.digest == digest for device in stayed)


@pytest.fixture
def stage(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(bundle, tmp_path, monkeypatch)


def see_late(stage: Stage, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each sees a file's latest content, or that it is gone, a few looks later; first half."""
    seen: dict[Any, bytes | None] = {}
    left: dict[Any, int] = {}

    def late(path: Path, most: int, what: str) -> bytes:
        key = stage.turn, path
        now = path.read_bytes() if path.exists() else None
        if key == (None, stage.folder / RUN):  # the coordinator sees its own file at once
            seen[key] = now
        if seen.get(key) != now:
            left[key] = left.get(key, int(rng.integers(4))) - 1
            if left[key] < 0:
                seen[key] = now
                del left[key]
            elif left[key] == 0 and now is not None:
                return now[: len(now) // 2]
        if seen.get(key) is None:
            raise FileNotFoundError(path)
        return seen[key] or b""

    monkeypatch.setattr(shared_folder, "read_small", late)


@pytest.fixture(scope="module")
def alone(bundle: Path, shared: Shared) -> Path:
    """The run of a single worker."""

    def train(path: Path) -> None:
        given = {**OPTIONS, "steps": STEPS}
        start.train(TrainConfig(bundle=str(bundle), output=str(path), **given), Events())

    return shared("a run without a fleet", train)


def test_a_worker_leaves_for_20_steps_and_returns(stage: Stage, alone: Path) -> None:
    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step in (4, 24):
            stage.devices[0].there = step == 24

    stage.trains(at, STEPS)
    stage.check(alone)
    (device,) = stage.devices
    assert stage.said("takes part") == 2 and stage.said("has left") == 1
    assert "steps that it had missed, and has taken from the log: 19" in device.notes
    assert device.helper.parts == STEPS - 2 - 20
    assert stage.said("bytes in ") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"method": "hizoo"},
        {"zo_scaling": "gradient-norm", "zo_scaling_interval": 2},
        pytest.param({"method": "one-point", "queries": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"zo_optimizer": "adam", "zo_window": 3, "grad_accumulation": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_methods_with_a_state_go_on(
    stage: Stage, bundle: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    alone, options = tmp_path / "alone", {**OPTIONS, **options}
    given = TrainConfig(bundle=str(bundle), output=str(alone), steps=4, **options)
    start.train(given, Events())
    stage.trains(lambda step: step in (1, 3) and stage.join(), 4, **options)
    stage.check(alone)
    assert [device.helper.parts for device in stage.devices] == [3, 1]


def test_a_killed_coordinator_goes_on_and_keeps_its_workers(stage: Stage, alone: Path) -> None:
    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step == 8:
            raise Killed

    with pytest.raises(Killed):
        stage.trains(at, 11)
    stage.resumes(lambda step: step == 9 and stage.join())  # from the save of step 6
    stage.check(alone)
    assert stage.said("takes part") == 3 and not stage.said("has left")


def test_files_of_others_and_half_written_ones_are_ignored(
    stage: Stage, alone: Path, rng: np.random.Generator
) -> None:
    def at(step: int) -> None:
        if step == 2:
            stage.join()
        name = stage.devices[0].helper.guest.name if stage.devices else "nobody"
        (stage.folder / f"{step + 1:08d}-{name}.part").write_bytes(rng.bytes(24))
        (stage.folder / "nobody.here").write_bytes(b"")
        if step == 5:
            (stage.folder / "holiday.jpg").write_bytes(rng.bytes(99))
            (stage.folder / "folder.here").mkdir()
            (stage.folder / ".00000007.step.partial").write_bytes(b"[")
        if step == 6:  # the device finds half a task, and the whole of it later
            task = stage.folder / f"{step - 1:08d}.step"
            whole = task.read_bytes()
            task.write_bytes(whole[:20])
            stage.look()
            task.write_bytes(whole)

    stage.trains(at, 9)
    stage.check(alone)
    assert stage.said("no whole messages of this session are ignored: 3, such as") == 1
    assert (stage.folder / "holiday.jpg").exists()
    assert stage.devices[0].helper.parts > 3


def away_from(stage: Stage, first: int, last: int) -> Happens:
    """A worker joins at step 2, and the folder is away from one step until another."""
    away = stage.path / "away"

    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step == first:
            stage.folder.rename(away)
        elif step == last:
            away.rename(stage.folder)

    return at


def test_a_folder_that_is_away_stops_workers_only(stage: Stage, alone: Path) -> None:
    stage.trains(away_from(stage, 4, 7), 10)
    stage.check(alone)
    assert stage.said("workers wait until the folder can be written") == 1
    assert stage.devices[0].helper.parts == 4


def test_lines_of_steps_in_which_the_folder_was_away_for_long_are_kept(
    stage: Stage, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "LINES", 4)
    stage.trains(away_from(stage, 3, 16), 19)
    stage.check(alone)
    left = sorted(path.name for path in stage.folder.glob("*.step"))
    assert left == ["00000016.step", "00000017.step", "00000018.step", "00000019.step"]


def test_an_end_that_could_not_be_written_is_told_by_resuming(stage: Stage, alone: Path) -> None:
    away = stage.path / "away"

    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step == STEPS:
            stage.folder.rename(away)

    stage.trains(at, STEPS)
    assert stage.said("tell them once they can see it: --resume RUN --parallel folder=") == 1
    (device,) = stage.devices
    for _ in range(50):
        stage.now += 1.0
        stage.look()
    waited = [note for note in device.notes if "nothing new" in note]
    assert re.search(rf"{stage.folder} for 3\d s: waiting for step {STEPS} or the end", waited[0])
    assert len(waited) == 1 and not device.over
    away.rename(stage.folder)
    stage.resumes(print)
    stage.look()
    stage.check(alone)


def test_a_coordinator_that_another_has_replaced_saves_and_ends(stage: Stage, alone: Path) -> None:
    other = TrainConfig(
        bundle=str(stage.bundle), steps=2, output=str(stage.path / "other"),
        parallel=f"folder={stage.folder}", **OPTIONS,
    )  # fmt: skip

    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step == 7:
            start.train(other, Events())

    with pytest.raises(WorkerError, match=f"{stage.folder} now has the messages of another"):
        stage.trains(at, STEPS)
    assert len(metrics_of(stage.run)) == AGREE_STEPS
    resume.resume(stage.run, Events(), {})
    assert adapter(stage.run) == adapter(alone)


def test_a_pause_of_the_coordinator_makes_it_wait_no_longer_afterwards(
    stage: Stage, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, paused = SharedFolder.read, [3600.0]

    def late(self: SharedFolder, name: str) -> bytes | None:
        if name.startswith("00000005-") and paused:
            stage.now += paused.pop()
        return read(self, name)

    def at(step: int) -> None:
        if step == 2:
            stage.join()
        elif step == 6:
            stage.devices[0].there = False

    monkeypatch.setattr(SharedFolder, "read", late)
    stage.trains(at, 9)
    stage.check(alone)
    (left,) = [note for note in stage.notes if "has left: no numbers" in note]
    assert float(re.findall(r"in ([\d.]+) s", left)[0]) < 100


def test_waiting_for_the_files_of_a_training_is_said(stage: Stage) -> None:
    def at(step: int) -> None:
        for file in stage.folder.glob("file-*"):
            file.write_bytes(b"half")
        stop, notes = Stop(), list[str]()

        def wait(waited_s: float) -> None:
            stage.now += 10.0
            stop.signal = 15 if waited_s > 100 else None

        with pytest.MonkeyPatch.context() as context, pytest.raises(InterruptedRunError):
            context.setattr(fleet, "pause", wait)
            guest = Guest(stage.folder, "late")
            with helper_of(guest, stage.path / "late", {}, stop, notes.append):
                pass
        said = [re.findall(r"for (\d+) s: waiting for (.*)", note) for note in notes]
        waits = [seconds for ((seconds, missing),) in said[1:] if "plan.json" in missing]
        assert [30 <= int(seconds) < 80 for seconds in waits] == [True, True]

    stage.trains(at, 1)


def test_a_worker_that_computes_otherwise_is_found(stage: Stage, alone: Path) -> None:
    def at(step: int) -> None:
        if step != 2:
            return
        helper = stage.join().helper
        part = helper.method.part
        helper.method.part = lambda *of: [value * (1 + 1e-15) for value in part(*of)]  # type: ignore[method-assign]

    stage.trains(at, 5)
    stage.check(alone)
    assert stage.said("computes otherwise, and is not used") == 1
    assert "computes otherwise than the coordinator" in stage.devices[0].error


def test_a_worker_with_other_adapters_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(step: int) -> None:
        if step == 2:
            with monkeypatch.context() as context, pytest.raises(UsageError) as refused:
                context.setattr(Adapters, "digest", lambda own: "f" * 64)
                stage.join()
            assert re.search(
                rf"initial_sha256: [0-9a-f]{{64}} on the coordinator, {'f' * 64} on this worker",
                str(refused.value),
            )
            tensors = stage.join().helper.trainer.adapters.tensors
            name = next(iter(tensors))
            tensors[name] = tensors[name] + 1e-7

    stage.trains(at, 3)
    said = "the adapters after step 2 have the SHA-256 [0-9a-f]{64} on the coordinator and [0-9a-f]"
    assert re.match(said, stage.devices[0].error)


def test_another_bundle_is_refused(stage: Stage, bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    with (other / "manifest.json").open("a") as file:
        file.write("\n")

    def at(step: int) -> None:
        said = "differ in the bundle: manifest.json has the SHA-256 .* SHA-256 .* on this worker"
        with pytest.raises(UsageError, match=said):
            stage.join(other)

    stage.trains(at, 1)


def test_another_training_in_the_folder_is_refused(stage: Stage, tmp_path: Path) -> None:
    stage.trains(lambda step: step == 1 and stage.join(), 3)
    device, other = stage.devices[0], tmp_path / "other"
    with pytest.raises(UsageError, match="another training, whose log begins with the SHA-256"):
        stage.trains(print, 3, output=other, seed=1)
    assert not other.exists()
    device.over = False
    stage.trains(print, 1, output=other, epsilon=0.01)
    assert re.search("has changed: its description has the SHA-256 .* and was", device.error)


def test_other_methods_and_options_are_refused(bundle: Path, tiny: Tiny, tmp_path: Path) -> None:
    folder = f"--parallel=folder={tmp_path}"
    given = [*train_arguments(bundle, tmp_path / "run", 2), folder]
    refuses(2, "--method mebp cannot be trained with workers that come and go", *given)
    full = tiny("gemma3", trainable="full", storage="bfloat16").path
    given[1] = str(full)
    refuses(2, "--trainable full cannot be trained", *given, "--method", "mezo")
    joining = ["train", bundle, f"--parallel=join={tmp_path}"]
    refuses(2, "leave out --data, --method", *joining, "--data", "x", "--method", "mezo")
    refuses(2, "or folder=DIR", *given[:-1], "--parallel=folder=")


def test_messages_are_written_into_a_folder_that_is_there_and_no_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied = shutil.copytree(bundle, "bundle")
    Path("gone").symlink_to("nowhere")
    given = [*train_arguments(copied, tmp_path / "run", 2), "--method=mezo"]
    before = listing(tmp_path)
    refuses(2, "gone is a link to nowhere, where nothing is", *given, "--parallel=folder=gone")
    refuses(2, "there is no such folder; make it first", *given, "--parallel=folder=none")
    for place in ("bundle", "bundle/graphs"):
        refuses(2, f"{place}/messages lies in the bundle", *given, f"--parallel=folder={place}")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("draw_of", range(20))
@pytest.mark.slow
def test_random_comings_and_goings(
    stage: Stage,
    alone: Path,
    rng: np.random.Generator,
    draw_of: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices come, pause, go on and are killed; files are seen late; the coordinator is killed."""
    rng = np.random.default_rng([draw_of, int(rng.integers(1 << 32))])
    see_late(stage, rng, monkeypatch)

    def at(step: int) -> None:
        if len(stage.devices) < 5 and rng.random() < 0.2:
            stage.join()
        for device in stage.devices:
            if rng.random() < 0.15:
                device.there = not device.there and not device.gone
            elif rng.random() < 0.02:
                device.killed()
        if rng.random() < 0.05:
            raise Killed

    done = None
    while done is None:
        with suppress(Killed):
            begun = (stage.run / "config.toml").exists()
            done = stage.resumes(at) if begun else stage.trains(at, STEPS)
    for _ in range(5 * STEPS):  # in which each step's file is seen in the end
        stage.look()
    stage.check(alone)
