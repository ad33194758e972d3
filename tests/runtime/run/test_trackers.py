"""Reporting to trackers: they get what metrics.jsonl holds, and a resumed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import evaluations_of, metrics_of, ondevice, struck, succeeds, train_arguments

from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.run.folder import RunFolder
from runtime.run.results import Events
from runtime.run.trackers import OF_TRACKERS, TRACKERS, named, reporting

STEPS = 4
WATCHED = {"eval_data": "random:9", "eval_rows": 1, "eval_every": 2, "save_every": 2}

FAKE_TENSORBOARD = """
import json
from pathlib import Path

class SummaryWriter:
    def __init__(self, logdir, purge_step=None):
        Path(logdir).mkdir(exist_ok=True)
        self.file = Path(logdir, "said").open("a")
        self.say("open", purge_step)
    def say(self, *what):
        self.file.write(json.dumps(what) + "\\n")
    def add_scalar(self, name, value, step):
        self.say(name, value, step)
    def flush(self):
        self.file.flush()
    def close(self):
        self.say("close")
        self.file.close()
"""
FAKE_WANDB = """
import json
from pathlib import Path

class Error(Exception):
    pass

class Settings(dict):
    pass

class Run:
    def __init__(self, given):
        self.file = Path(given["dir"], "wandb").open("a")
        self.say("init", given)
    def say(self, *what):
        self.file.write(json.dumps(what) + "\\n")
        self.file.flush()
    def define_metric(self, name, step_metric):
        self.say("metric", name, step_metric)
    def log(self, values):
        self.say("log", values)
    def finish(self, exit_code):
        self.say("finish", exit_code)

def init(**given):
    if given["project"] == "refused":
        raise Error("api_key not configured")
    return Run(given)
"""
FILES = {"tensorboard": "tensorboard/said", "wandb": "wandb"}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that stand for the libraries, and write down how they are called."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "tensorboardX.py").write_text(FAKE_TENSORBOARD)
    (folder / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported goes again
        monkeypatch.delitem(sys.modules, name)
    return folder


def said(run: Path, to: str) -> list[list[Any]]:
    return [json.loads(line) for line in (run / FILES[to]).read_text().splitlines()]


def logged(run: Path, to: str, skip: int = 0) -> list[tuple[str, int, float]]:
    """Every value (name, step, value) in the order in which the tracker got it.

    skip: how many of its first calls are left out.
    """
    calls = said(run, to)[skip:]
    if to == "tensorboard":
        return [(one[0], one[2], one[1]) for one in calls if len(one) == 3]
    values = [one[1] for one in calls if one[0] == "log"]
    return [(name, one["step"], one[name]) for one in values for name in one if name != "step"]


def expected(run: Path) -> list[tuple[str, int, float]]:
    """What the run's own files say."""
    steps = {"before": 0, "after": STEPS}
    parts = [("train", one["step"], one) for one in metrics_of(run)]
    parts += [
        ("valid", steps.get(when) or int(when.replace("before", "0")), one)
        for when, one in evaluations_of(run).items()
    ]
    return [
        (f"{group}/{name}", step, value)
        for group, step, one in parts
        for name, value in one.items()
        if name != "step"
    ]


@pytest.mark.parametrize("to", FILES)
def test_a_tracker_gets_what_the_run_writes_and_a_resumed_run_goes_on_at_its_step(
    bundle: Path, libraries: Path, tmp_path: Path, to: str
) -> None:
    run = tmp_path / "run"
    given = train_arguments(bundle, run, STEPS, report_to=to, **WATCHED)
    died = struck(signal.SIGKILL, "step 3", *given)  # step 2 is saved
    assert died.returncode == -signal.SIGKILL, died.stderr
    before, calls = logged(run, to), len(said(run, to))
    assert {step for _, step, _ in before} == {0, 1, 2, 3}  # none is held back
    succeeds("train", "--resume", run)
    later = logged(run, to, calls)
    assert sorted([*(one for one in before if one[1] < 3), *later]) == sorted(expected(run))
    assert {name for name, _, _ in later} >= {"train/loss", "train/footprint_bytes", "valid/loss"}
    losses = {(step, loss) for name, step, loss in (*before, *later) if name == "train/loss"}
    assert len(losses) == STEPS  # step 3 twice, with the same bits
    opened = said(run, to)[calls]
    if to == "tensorboard":
        assert opened == ["open", 3]  # what follows replaces what was there
        return
    (_, first), *_, (last, code) = said(run, to)
    assert (first["project"], first["name"], first["resume"]) == ("ondevice", "run", "allow")
    assert first["config"]["steps"] == STEPS and (last, code) == ("finish", 0)
    assert opened[1]["id"] == first["id"]


def test_a_refused_run_leaves_nothing(bundle: Path, libraries: Path, tmp_path: Path) -> None:
    for to in TRACKERS:
        run = tmp_path / to
        done = ondevice(*train_arguments(bundle, run, STEPS, report_to=to, budget="1MB"))
        assert done.returncode == 3 and not run.exists(), done.stderr
    leftover = RunFolder(tmp_path / "killed")
    for name in OF_TRACKERS:
        (leftover.path / name).mkdir(parents=True)
    with leftover.created():
        assert not any((leftover.path / name).exists() for name in OF_TRACKERS)


def test_what_is_missing_or_refused_is_said(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "refused")
    given = {"bundle": "b", "data": "d"}
    with (
        pytest.raises(UsageError, match=r"api_key not configured; log in .* WANDB_MODE=offline"),
        reporting(TrainConfig(**given, report_to="wandb"), tmp_path, 0, Events()),
    ):
        pass
    for name, to in (("tensorboardX", "tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
        with (
            pytest.raises(UsageError, match=rf"needs {name}: pip install 'ondevice-tune\[{to}\]'"),
            reporting(TrainConfig(**given, report_to=to), tmp_path, 0, Events()),
        ):
            pass


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import sys\nimport ondevice.cli.main, runtime.run.start\n"
        "unwanted = {'tensorboardX', 'wandb', 'datasets', 'transformers', 'mlx_lm', 'torch'}\n"
        "unwanted |= {'email', 'importlib.metadata', 'difflib', 'statistics', 'mlx.optimizers'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={**os.environ})


def test_only_numbers_are_sent() -> None:
    found = named("train", {"step": 3, "loss": None, "seconds": 1.5, "skipped": True, "a": "b"})
    assert found == {"train/seconds": 1.5, "train/skipped": 1.0}


def test_the_real_tensorboard_reads_its_files(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    run = tmp_path / "run"
    succeeds(*train_arguments(bundle, run, STEPS, report_to="tensorboard", **WATCHED))
    (file,) = (run / "tensorboard").iterdir()
    data, found = file.read_bytes(), set()
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        found |= {(one.tag, event.step) for one in event.summary.value}
    assert found == {(name, step) for name, step, _ in expected(run)}


def test_the_real_wandb_works_offline(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    succeeds(*train_arguments(bundle, run, STEPS, report_to="wandb", **WATCHED))
    assert len(list((run / "wandb").glob("offline-run-*/*.wandb"))) == 1
