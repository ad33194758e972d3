"""Runs on several processes that `mpirun` starts: the same bits as on one, and how they end."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.bundles import Tiny
from support.exchange import NEEDS_MPI, mpirun
from support.runs import (
    adapter,
    evaluations_of,
    here,
    json_of,
    metrics_of,
    refuses,
    succeeds,
    summary_of,
    train_arguments,
)
from support.shared import Shared

from runtime.bundle.store import open_bundle, write_slices
from runtime.run.folder import WORKERS, RunFolder
from runtime.storage.saves import SLOTS

STEPS = 6
OPTIONS: dict[str, Any] = {"method": "mezo", "queries": 2, "lr_schedule": "constant"}
EVALUATED = {"eval_data": "random:3", "eval_rows": 3, "eval_every": 2, "save_every": 2}
ROWS = 2

# something happens to the worker of one rank before a step
HAPPENS = """
import os, signal, sys
from ondevice.cli.main import main
from runtime.machine.backend import prepare

prepare()
import msgspec
from runtime.run import opened, start, worker
from runtime.run.trainer import Trainer

what, rank, step, *arguments = sys.argv[1:]
original, machine = Trainer._step, opened.machine_of_run

def larger(*given):
    return msgspec.structs.replace(machine(*given), process_bytes=500_000_000)

if what == "process" and os.environ["OMPI_COMM_WORLD_RANK"] == rank:
    start.machine_of_run = worker.machine_of_run = larger

def struck(self):
    if what == "pace":
        self._pace = [1 / (1 + self.team.rank)] * len(self._pace)
    elif self.done == int(step) and self.team.rank == int(rank):
        if what == "budget":
            self.meter._budget_bytes = 1
        elif what == "adapters":
            name = next(iter(self.adapters.tensors))
            self.adapters.tensors[name] = self.adapters.tensors[name] + 1e-7
        elif what == "weights":
            name = next(iter(self.session.weights._vectors))
            self.session.weights._vectors[name] += 1e-3
        else:
            signal.raise_signal(int(what))
    return original(self)

Trainer._step = struck
sys.exit(main(arguments))
"""

pytestmark = NEEDS_MPI


def workers(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return mpirun(*[["-m", "ondevice", *arguments]] * count)


def happens(what: object, rank: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A training by two workers of which one meets with something before step 4."""
    return mpirun(*[["-c", HAPPENS, what, rank, 3, *arguments]] * 2)


def training(bundle: Path, run: Path, steps: int = STEPS, **more: object) -> list[str]:
    given = {**OPTIONS, **EVALUATED, "batch_size": ROWS, **more}
    return train_arguments(bundle, run, steps, **given)


@pytest.fixture(scope="module")
def alone(bundle: Path, shared: Shared) -> Path:
    """The run of a single worker."""
    return shared("a run alone", lambda path: succeeds(*training(bundle, path)) and None)


def check_same(run: Path, alone: Path) -> None:
    assert adapter(run) == adapter(alone)
    assert (run / "trajectory.jsonl").read_bytes() == (alone / "trajectory.jsonl").read_bytes()
    assert [step["loss"] for step in metrics_of(run)] == [one["loss"] for one in metrics_of(alone)]
    evaluations = evaluations_of(run)
    assert {when: evaluations[when] for when in evaluations_of(alone)} == evaluations_of(alone)
    assert not (run / WORKERS).exists()


@pytest.mark.parametrize(
    ("grid", "rows"),
    [
        ("data=2", 2),
        pytest.param("perturb=4", 2, marks=pytest.mark.slow),
        pytest.param("data=2,perturb=2", 2, marks=pytest.mark.slow),
        pytest.param("data=4", 4, marks=pytest.mark.slow),
    ],
)
def test_workers_make_the_run_of_one(
    bundle: Path, alone: Path, tmp_path: Path, grid: str, rows: int
) -> None:
    """Begun by several, evaluated by them, and resumed by one."""
    run, count = tmp_path / "run", math.prod(map(int, re.findall("=(.)", grid)))
    if rows > 2:
        alone = tmp_path / "alone"
        succeeds(*training(bundle, alone, batch_size=rows))
    done = workers(count, *training(bundle, run, 3, parallel=grid, batch_size=rows))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the run and its adapter") == done.stderr.count("fits the budget") == 1
    assert "parallel" not in (run / "config.toml").read_text()
    print(f"MeZO, {grid}: {[step['sent_bytes'] for step in metrics_of(run)]} bytes in the steps")
    succeeds("train", "--resume", run, "--steps", STEPS)
    check_same(run, alone)


@pytest.mark.slow
def test_several_resume_the_run_of_one(bundle: Path, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeeds(*training(bundle, run, 3))
    resumed = ["train", "--resume", run, "--steps", STEPS, "--parallel", "data=2"]
    done = workers(2, *resumed)
    assert done.returncode == 0, done.stderr
    check_same(run, alone)


def check_lost(done: subprocess.CompletedProcess[str], run: Path) -> None:
    """Rank 1 is named, and step 3 saved, unless `mpirun` has killed rank 0 2 s later.

    On a busy machine that is before rank 0 could save.
    """
    assert "rank 1 on " in done.stderr and "Traceback" not in done.stderr, done.stderr
    in_time = "its state after step 3 is saved" in done.stderr
    assert in_time or done.returncode == 128 + signal.SIGKILL, done.stderr
    save = RunFolder(run).saves.latest()
    assert save is not None and save.name in (
        {"step-00000003"} if in_time else {"step-00000002", "step-00000003"}
    )


def test_a_killed_worker_ends_all_and_what_is_done_is_saved(
    bundle: Path, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = happens(signal.SIGKILL, 1, *training(bundle, run, parallel="perturb=2"))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "its process has ended" in done.stderr
    check_lost(done, run)
    succeeds("train", "--resume", run)
    check_same(run, alone)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (signal.SIGTERM, 130, "SIGTERM on rank 1 on .*: its state after step 4 is saved"),
        pytest.param(
            "budget", 3, "passed its budget on rank 1 .* step 4 is saved", marks=pytest.mark.slow
        ),
        pytest.param(
            "adapters",
            1,
            "no longer agree: the adapters after step 4 have the SHA-256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            signal.SIGSTOP, 1, "rank 1 on .*: nothing was heard of it", marks=pytest.mark.slow
        ),
    ],
)
def test_what_ends_one_worker_ends_all(
    bundle: Path, tmp_path: Path, what: object, code: int, said: str
) -> None:
    run = tmp_path / "run"
    done = happens(what, 1, *training(bundle, run, parallel="perturb=2"))
    assert done.returncode == code, done.stderr
    assert len(done.stderr.split("ondevice: ")) == 2, done.stderr  # rank 0 alone says it
    assert re.search(said, done.stderr), done.stderr
    assert not (run / WORKERS).exists() and "Traceback" not in done.stderr
    last = 2 if what == "adapters" else 3 if what == signal.SIGSTOP else 4
    assert [place.name for place in RunFolder(run).saves.all()] == [f"step-{last:08d}"]


def test_weights_that_differ_end_the_run(tiny: Tiny, tmp_path: Path) -> None:
    model, run = tiny("gemma3", trainable="full", storage="bfloat16").path, tmp_path / "run"
    words = train_arguments(model, run, 4, method="mezo", parallel="perturb=2")
    done = happens("weights", 1, *words)
    assert done.returncode == 1, done.stderr
    said = "no longer agree: the weights after step 4 have the SHA-256 (.*) on rank 0 on .* and "
    hashes = re.search(said + "(.*) on rank 1", done.stderr)
    assert hashes is not None and hashes[1] != hashes[2], done.stderr
    assert f"after removing {SLOTS} there" in done.stderr


def test_a_slow_worker_gets_less_and_the_bits_stay(
    bundle: Path, alone: Path, tmp_path: Path
) -> None:
    """Four points for two workers, of which one is half as fast; a step of each sends bytes."""
    run = tmp_path / "run"
    done = happens("pace", 1, *training(bundle, run, parallel="perturb=2"))
    assert done.returncode == 0, done.stderr
    check_same(run, alone)
    assert "the work is shared by the forward passes per second: 1 of rank 0" in done.stderr
    speeds = RunFolder(run).speeds()
    assert speeds is not None and speeds.passes_per_s == (1.0, 0.5)
    rows, numbers, news = ROWS, 2 * 8, 18  # a loss and a summand of each row at each point
    sent = [points * rows * numbers + news for points in (2, 2, 2, 2, 3, 3)]
    assert [step["sent_bytes"] for step in metrics_of(run)] == sent
    assert summary_of(run)["sent_bytes_per_step"] == round(sum(sent) / STEPS)
    assert "each process sent 93 bytes a step" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_holder_of_a_slice_ends_all(
    bundle: Path, alone: Path, tmp_path: Path, what: signal.Signals
) -> None:
    """Rank 0 waits for weights then, not for losses; another number of slices goes on."""
    run, slices = tmp_path / "run", write_slices(open_bundle(bundle), 2, tmp_path)
    words = [training(each.path, run, parallel="perturb=2") for each in slices]
    done = mpirun(*[["-c", HAPPENS, what, 1, 3, *each] for each in words])
    assert done.returncode == (128 + what if what == signal.SIGKILL else 1), done.stderr
    check_lost(done, run)
    succeeds("train", bundle, "--resume", run)
    check_same(run, alone)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_a_worker_is_refused(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = happens("process", 1, *training(bundle, run, parallel="data=2"))
    assert done.returncode == 3 and not run.exists(), done.stderr
    said = "rank 1 on .*: rank 0's plan, .* does not fit here: it would take 5.. MB of a budget of"
    assert re.search(said, done.stderr), done.stderr


def test_wrong_numbers_are_refused(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = training(bundle, run, parallel="data=2,perturb=2")
    refuses(2, "2 x 2 = 4 processes, and 1 process is there; start them with: mpirun -n 4", *given)
    refuses(2, "numbers of workers such as data=2", *training(bundle, run, parallel="rows=2"))
    done = workers(2, *training(bundle, run))
    assert done.returncode == 2 and not run.exists()
    assert "mpirun has started 2 processes, and without --parallel" in done.stderr


def test_another_bundle_or_command_is_refused(bundle: Path, tmp_path: Path) -> None:
    other, run = tmp_path / "bundle", tmp_path / "run"
    shutil.copytree(bundle, other)
    with (other / "manifest.json").open("a") as file:
        file.write("\n")
    first = training(bundle, run, parallel="data=2")
    second = training(other, run, parallel="data=2")
    evaluation = ["eval", bundle, "--data", "random:3", "--parallel", "data=2"]
    for words, fact in ((second, "bundle: manifest"), (evaluation, "command: train on rank 0")):
        done = mpirun(*[["-m", "ondevice", *each] for each in (first, words)])
        assert done.returncode == 2 and f"the workers differ in the {fact}" in done.stderr
        assert not run.exists()


@pytest.mark.slow
def test_several_evaluate_as_one(bundle: Path, alone: Path) -> None:
    words = ["eval", bundle, "--data", "random:3", "--eval-rows", 5, "--adapter", alone, "--json"]
    done = workers(2, *words, "--parallel", "data=2")
    assert done.returncode == 0, done.stderr
    expected = json_of(*words, by=here)
    shared = json.loads(done.stdout)
    for name in ("loss", "perplexity", "accuracy", "exact", "scored_tokens", "rows"):
        assert shared[name] == expected[name]
