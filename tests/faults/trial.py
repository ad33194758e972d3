"""A run of several machines that one event disturbs, and its end and result.

What is wrong is a hang, a save that is not whole, a message that does not name the rank, or a
result that is not that of a run which nobody has disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from support.forks import ROOT
from support.models import relative
from support.runs import adapter

from faults.network import Network
from runtime.core.errors import OnDeviceError
from runtime.run.folder import RunFolder

MACHINES, SAVED_EVERY = 3, 3
LONGEST_END_S = 30.0  # from the event to the end of every process that was not stopped
LONGEST_S = 600.0  # of what nothing disturbs, on a busy machine
PAUSE_S = 3.0  # of an event that passes
SAME = 1e-5  # of the adapters' norm, where sums are rounded otherwise
MARK = "ONDEVICE_FAULTS"  # in the environment of every process of a case


@dataclass(frozen=True)
class Event:
    """What happens to one machine. ends: whether the run must end by it."""

    name: str
    ends: bool
    begin: Callable[[Network, int, int], None]  # the network, the machine, its process
    finish: Callable[[Network, int, int], None]


def _signal(number: int) -> Callable[[Network, int, int], None]:
    return lambda network, machine, process: os.kill(process, number)


def _cut(network: Network, machine: int, process: int) -> None:
    network.cut.add(machine)


def _heal(network: Network, machine: int, process: int) -> None:
    network.cut.discard(machine)


def _nothing(network: Network, machine: int, process: int) -> None:
    """What is done stays so."""


EVENTS = (
    Event("killed", True, _signal(signal.SIGKILL), _nothing),
    Event("stopped", True, _signal(signal.SIGSTOP), _nothing),
    Event("cut off", True, _cut, _nothing),
    Event(f"stopped for {PAUSE_S:.0f} s", False, _signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
    Event(f"cut off for {PAUSE_S:.0f} s", False, _cut, _heal),
)


@dataclass(frozen=True)
class Training:
    """How a method trains: its steps, its rate, and the grid of so many machines."""

    steps: int
    rate: float
    grids: Mapping[int, str]


METHODS = {  # MeBP adds up gradients in every block
    "mezo": Training(30, 1e-4, {2: "perturb=2", 3: "data=3"}),
    "mebp": Training(8, 1e-3, {2: "data=2", 3: "data=3"}),
}


@dataclass
class Outcome:
    """What became of a case. The seconds are from the event to the end of the processes."""

    ranks_s: float | None = None  # of `ondevice`
    all_s: float | None = None  # and of `mpirun` and its helpers
    code: int | None = None
    said: str = ""
    moment: str = ""
    resumed: str = ""
    wrong: list[str] = field(default_factory=list)


class Case:
    """A run by `method` on so many machines, in a folder of its own."""

    def __init__(self, bundle: Path, folder: Path, method: str, machines: int) -> None:
        self.bundle, self.folder, self.run = bundle, folder, folder / "run"
        self.method, self.machines = method, machines
        self.mark = f"{folder.name}-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def words(self, machines: int) -> list[str]:
        """The command that trains, or goes on."""
        training = METHODS[self.method]
        words = [sys.executable, "-m", "ondevice", "train"]
        if (self.run / "config.toml").exists():
            words += ["--resume", str(self.run)]
        else:
            words += [str(self.bundle), "--data=random:5", "--batch-size=3", "--max-seq-length=24"]
            words += [f"--save-every={SAVED_EVERY}", f"--output={self.run}"]
            words += ["--lr-schedule=constant", "--seed=3", "--also-evaluate=none"]
            words += [f"--method={self.method}", f"--learning-rate={training.rate}"]
            words += [f"--steps={training.steps}"]
        return words if machines == 1 else [*words, f"--parallel={training.grids[machines]}"]

    def start(self, network: Network | None, machines: int) -> subprocess.Popen[str]:
        """Start it over a network, or on this machine alone without one."""
        words = self.words(machines)
        if network is not None:
            mca = ("--mca", "plm_rsh_agent", str(network.agent))
            hosts = ",".join(network.hosts[:machines])
            launched = ["mpirun", "--allow-run-as-root", *mca, "--host", hosts]
            words = network.at(network.hosts[0], *launched, "-n", str(machines), *words)
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, MARK: self.mark, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    @property
    def steps(self) -> int:
        """How many steps the run has done."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def processes(self) -> dict[int, int | None]:
        """The live processes of this case, and which rank each is, None for those of `mpirun`."""
        return {
            process: int(environment.get("OMPI_COMM_WORLD_RANK", -1))
            for process in (int(path.name) for path in Path("/proc").glob("[0-9]*"))
            if (environment := _environment(process)).get(MARK) == self.mark
        }

    def ranks(self) -> dict[int, int]:
        """The process of each rank that has one, and not the child that keeps its time."""
        first = sorted(self.processes().items(), reverse=True)
        return {rank: process for process, rank in first if rank >= 0}


def _pause(seconds: float) -> None:
    """Let the processes go on, between two looks, or until a moment that was drawn."""
    time.sleep(seconds)


def undisturbed(case: Case) -> None:
    """Run a case to its end, alone."""
    if case.start(None, 1).wait(LONGEST_S):
        raise RuntimeError(f"nothing has disturbed it, and it failed: {case.said}")


def disturbed(
    case: Case,
    network: Network,
    event: Event,
    rank: int,
    moment: tuple[int, float],
    resumed_by: int,
    expected: Case,
) -> Outcome:
    """Disturb a run so many seconds after a step has ended, or its process begun; see its end."""
    step, seconds = moment
    outcome = Outcome()
    started = case.start(network, case.machines)
    while started.poll() is None and not (case.steps >= step if step else rank in case.ranks()):
        _pause(0.005)
    _pause(seconds)
    process, done = case.ranks().get(rank), case.steps
    outcome.moment = f"after step {done}" if done else f"{seconds:.1f} s after its start"
    if process is not None:
        event.begin(network, rank, process)
        if not event.ends:
            _pause(PAUSE_S)
            event.finish(network, rank, process)
        _await_end(case, started, event, rank, outcome)
    started.wait()
    outcome.code, outcome.said = started.returncode, case.said
    network.cut.clear()
    if process is None or outcome.code == 0:
        outcome.moment += ", ended by itself"
    elif not ((case.run / "summary.json").exists() or _names(outcome.said, event, rank, done)):
        outcome.wrong.append("the rank is not named")
    if "Traceback" in outcome.said:
        outcome.wrong.append("a traceback")
    outcome.wrong += [] if event.ends or outcome.code == 0 else ["an event that passes ended it"]
    outcome.resumed = _resumed(case, network, resumed_by, outcome)
    outcome.wrong += differences(case, expected)
    return outcome


def _names(said: str, event: Event, rank: int, done: int) -> bool:
    """Whether a message names who is lost: to whom is cut off, or waits at the start, any other.

    Where `mpirun` kills all before rank 0 can speak, its own message does.
    """
    ranks = range(MACHINES) if event.name == "cut off" or not done else [rank]
    return any(
        f"rank {number} on node{number}" in said or f"process rank {number} with PID" in said
        for number in ranks
    )


def _await_end(
    case: Case, started: subprocess.Popen[str], event: Event, rank: int, outcome: Outcome
) -> None:
    """Wait for the end of `mpirun` and all ranks; what is left after the longest time is killed.

    The helpers of `mpirun` on a machine that is cut off learn of its end later.
    """
    begun = time.monotonic()
    longest = LONGEST_END_S if event.ends else LONGEST_S
    while (passed := time.monotonic() - begun) < longest:
        left = case.processes()
        others = {each for each in left.values() if each >= 0}
        if event.name == "stopped":
            others -= {rank}  # it cannot end by itself where nobody can reach it
        if not case.steps and not all(map(_waits, (p for p, r in left.items() if r in others))):
            begun = time.monotonic()  # on a busy machine it takes long until they wait at all
        if outcome.ranks_s is None and not others:
            outcome.ranks_s = passed
        if not others and started.poll() is not None:
            outcome.all_s = passed
            kill_all(case)
            return
        _pause(0.02)
    ranks = sorted(others)
    outcome.wrong.append(f"a hang of ranks {ranks}" if ranks else "a hang of mpirun")
    kill_all(case)


def _resumed(case: Case, network: Network, machines: int, outcome: Outcome) -> str:
    """Check the last save, and finish the run with so many machines; says how."""
    folder = RunFolder(case.run)
    try:
        save = folder.saves.latest() if (case.run / "config.toml").exists() else None
        if save is not None:
            folder.check_save(save)
    except OnDeviceError as problem:
        outcome.wrong.append(f"the last save is not whole: {problem}")
    step = 0 if save is None else folder.saves.step_of(save)
    started = case.start(network if machines > 1 else None, machines)
    try:
        started.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        kill_all(case)
        outcome.wrong.append("a hang of the resumed run")
    if started.returncode:
        outcome.wrong.append(f"it cannot be resumed: {case.said}")
    return f"{step} by {machines}"


def differences(case: Case, expected: Case) -> list[str]:
    """How the files of a run differ from those of an undisturbed one."""
    if not (case.run / "adapters.safetensors").exists():
        return ["no adapter"]
    if case.method == "mezo":
        logs = [(each.run / "trajectory.jsonl").read_bytes() for each in (case, expected)]
        same = adapter(case.run) == adapter(expected.run) and logs[0] == logs[1]
        return [] if same else ["another result"]
    ours, theirs = (_values(each.run) for each in (case, expected))
    far = relative(ours, theirs)
    return [f"another result, by {far:.1e}"] if far > SAME else []


def _waits(process: int) -> bool:
    """Whether a process has come so far that it waits for others, with MPI's library."""
    try:
        return "libmpi" in Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return True  # it has ended


def kill_all(case: Case) -> None:
    """End every process of a case."""
    while processes := case.processes():
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has just ended
        _pause(0.05)


def _values(run: Path) -> np.ndarray:
    loaded = mx.load(str(run / "adapters.safetensors"))
    assert isinstance(loaded, dict)
    return np.concatenate([np.array(loaded[name]).reshape(-1) for name in sorted(loaded)])


def _environment(process: int) -> dict[str, str]:
    """The environment of a live process; empty of one that has ended."""
    try:
        text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in text.split("\0") if line)
