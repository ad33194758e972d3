"""Training runs for tests, by the command line, in processes of their own or in this one."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from harness.measure import process
from harness.measure.process import Ended
from ondevice.cli.main import main
from runtime.core.signals import ENDING
from runtime.machine.backend import prepare
from runtime.machine.footprint import Meter
from runtime.machine.glibc import trim_heap
from runtime.machine.machine import Machine
from runtime.run import budget, resume, start
from runtime.run.folder import RunFolder
from runtime.run.results import Step
from support.forks import ROOT, forked, forks, import_path

COMMAND = [sys.executable, "-m", "ondevice"]
EXPORTS = (("export",), ("fuse",))  # which import what takes longest
MAIN = "import sys; from ondevice.cli.main import main; sys.exit(main())"
UNBOUND = f"import runtime.config.base as base; base._problems = lambda *_, **__: []; {MAIN}"


def latest(arguments: Sequence[object]) -> list[str]:
    """The words of a command without flags that come again later, with which a test varies them."""
    parts: list[list[str]] = []
    for word in ["--output" if word == "-o" else word for word in map(str, arguments)]:
        flag = parts[-1][0] if parts and len(parts[-1]) == 1 else ""
        if flag.startswith("--") and "=" not in flag and not word.startswith("--"):
            parts[-1].append(word)  # its value, or what follows a switch
        else:
            parts.append([word])
    names = [part[0].partition("=")[0] for part in parts]
    varied = [name.startswith("--") and name != "--also-evaluate" for name in names]
    return [
        word
        for at, part in enumerate(parts)
        if not (varied[at] and names[at] in names[at + 1 :])
        for word in part
    ]


def ondevice(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; with options of `subprocess.run`, in a fresh one."""
    arguments = tuple(latest(arguments))
    if not options:
        return python(MAIN, *arguments, exporting=arguments[:1] in EXPORTS)
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def measured(words: Sequence[str]) -> Ended:
    """As `harness.measure.process.run`; commands of `ondevice` are forks where that is possible."""
    if list(words[1:4]) != ["-P", "-m", "ondevice"]:
        return process.run(words)  # another module, or with words before it
    done = ondevice(*words[4:])
    return Ended(done.returncode, done.stdout, done.stderr, interrupted=False)


def unbound(*arguments: object) -> subprocess.CompletedProcess[str]:
    """As `ondevice`, also with numbers that options refuse, as of a training that diverges."""
    return python(UNBOUND, *latest(arguments))


def python(
    code: str, *arguments: object, program: Path = ROOT, exporting: bool = False
) -> subprocess.CompletedProcess[str]:
    """What `python -c CODE ARGUMENTS` comes to, in a fork where that is possible.

    program: the folder whose packages it imports, for example of `copied_program`.
    exporting: it imports what exports do.
    """
    source = forks(program, exporting)
    path = {} if program == ROOT else {"PYTHONPATH": import_path(program)}
    environment = {**os.environ, **path}
    if source is not None:
        done = forked(source.address, code, *arguments, environment=environment)
        if done is not None:
            return done
    own = () if program == ROOT else ("-P",)  # else the packages here would come first
    command = [sys.executable, *own, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def copied_program(folder: Path) -> Path:
    """A copy of all packages, for a test to change."""
    for floor in ("ondevice", "harness", "export", "runtime"):
        half_written = shutil.ignore_patterns("*.pyc.*")  # by processes that import it meanwhile
        shutil.copytree(ROOT / floor, folder / floor, ignore=half_written)
    return folder


@cache
def _terminal() -> int:
    """The descriptor of a terminal of 80 columns, to which nothing is written."""
    _, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    return terminal


class Terminal(io.StringIO):
    """A stream that is a terminal of 80 columns."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return _terminal()


def here(
    *arguments: object, stream: type[io.StringIO] = io.StringIO
) -> subprocess.CompletedProcess[str]:
    """As `ondevice`, in this process: for what ends before anything trains under a budget.

    It writes on such a `stream`. Memory that earlier tests have freed is given back, since plans
    count the process as it is.
    """
    words = latest(arguments)
    said, warned = stream(), stream()
    handlers = {number: signal.getsignal(number) for number in ENDING}
    gc.collect()
    trim_heap()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(warned):
            code = main(words)
    except SystemExit as end:  # after --help
        code = int(end.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        prepare()  # exports have the heap kept otherwise
    return subprocess.CompletedProcess(words, code, said.getvalue(), warned.getvalue())


# a signal where progress is told, before its bar shows it
STRUCK = """
import signal, sys
from contextlib import contextmanager

import ondevice.cli.progress as progress

numbers, moment, *arguments = sys.argv[1:]

def told(where):
    if moment == where:
        for number in numbers.split(","):
            signal.raise_signal(int(number))

def striking(bar, where):
    @contextmanager
    def made(*a, **k):
        with bar(*a, **k) as show:
            yield lambda *what: (told(where(*what)), show(*what))
    return made

progress.task_bar = striking(progress.task_bar, lambda what, done, total: what)
progress.step_bar = striking(progress.step_bar, lambda step, total: f"step {step.number}")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
from ondevice.cli.main import main

sys.exit(main(arguments))
"""


def struck(
    number: signal.Signals | tuple[signal.Signals, ...], moment: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """As `ondevice`, but the process gets a signal, or several, at a moment that no clock decides.

    moment: "step N", when its line of metrics is written and it is not yet saved; or the task
    that the command's progress names: "evaluating (before)", "graphs", a tensor's name.
    """
    numbers = ",".join(
        str(int(one)) for one in (number if isinstance(number, tuple) else (number,))
    )
    return python(STRUCK, numbers, moment, *latest(arguments), exporting=arguments[:1] in EXPORTS)


MUCH = "6GB" if mx.cuda.is_available() else "400MB"  # CUDA's libraries alone take 1 GB
NO_OTHERS = "--also-evaluate=none"  # a process for their tokens, and 30 rows before and after


class Unwatched(Meter):
    """Never over budget: the process of the tests is larger than the one that is planned for."""

    @property
    def over_budget(self) -> bool:
        return False


def on_machine(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let runs of this process be planned for a machine that is written down."""
    monkeypatch.setattr(budget, "this_machine", lambda *asked: machine)
    monkeypatch.setattr(start, "Meter", Unwatched)
    monkeypatch.setattr(resume, "Meter", Unwatched)


def train_arguments(bundle: Path, run: Path, steps: int, **more: object) -> list[str]:
    given = {
        "data": "random:5",
        "max-seq-length": 24,
        "steps": steps,
        "batch-size": 1,
        "budget": MUCH,  # runs in this process take what earlier tests hold besides
        "save-every": 1,
        "output": run,
        "learning-rate": 1e-2,
        "lr-schedule": "cosine",
        "also-evaluate": "none",
        **{key.replace("_", "-"): value for key, value in more.items()},
    }
    return ["train", str(bundle), *(f"--{key}={value}" for key, value in given.items())]


def replaced(run: Path, name: str, text: str) -> None:
    """Give a file of a run another content, and the checksum of that."""
    RunFolder(run).write(name, text.encode())


def adapter(run: Path) -> bytes:
    return (run / "adapters.safetensors").read_bytes()


def succeeds(
    *arguments: object, by: Callable[..., subprocess.CompletedProcess[str]] = ondevice
) -> subprocess.CompletedProcess[str]:
    """A command that must succeed.

    by: `ondevice`, or `here`.
    """
    done = by(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def json_of(
    *arguments: object, by: Callable[..., subprocess.CompletedProcess[str]] = ondevice
) -> Any:
    """What a command that must succeed says with `--json`."""
    return json.loads(succeeds(*arguments, "--json", by=by).stdout)


def killed_and_resumed(
    run: Path, moment: str, arguments: list[Any]
) -> subprocess.CompletedProcess[str]:
    """Kill the command that begins the run at a moment, as of `struck`, and resume the run."""
    done = struck(signal.SIGKILL, moment, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return succeeds("train", "--resume", run)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_same(run: Path, expected: Path) -> None:
    """Two runs ended in the same bits: adapters, state, losses, evaluations, and the log if any."""
    ends = [sorted((one / "saves").iterdir())[-1] for one in (run, expected)]
    assert ends[0].name == ends[1].name
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (run / name).read_bytes() == (expected / name).read_bytes(), name
    assert (ends[0] / "method.bin").read_bytes() == (ends[1] / "method.bin").read_bytes()
    told = ("step", "loss", "learning_rate", "gradient_norm")
    steps = [[[line.get(one) for one in told] for line in metrics_of(of)] for of in (run, expected)]
    assert steps[0] == steps[1]
    names = {"evaluations.json", "trajectory.jsonl"}
    there = {name for name in names if (expected / name).exists()}
    assert there == {name for name in names if (run / name).exists()}
    assert all((run / name).read_bytes() == (expected / name).read_bytes() for name in there)


def step_of(number: int, **facts: Any) -> Step:
    """A step as a run tells it, made up."""
    peaks = dict.fromkeys(("footprint_bytes", "peak_footprint_bytes", "peak_rss_bytes"), 93_000_000)
    given = {"loss": 1.5, "learning_rate": 3e-4, "scored_tokens": 10, "tokens": 48, "seconds": 2.0}
    return Step(**{"number": number, "forward_passes": 1, **given, **peaks, **facts})


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def refuses(
    code: int,
    said: str,
    *arguments: object,
    by: Callable[..., subprocess.CompletedProcess[str]] = here,
) -> subprocess.CompletedProcess[str]:
    """A command that must end with this exit code, and say this on stderr."""
    done = by(*arguments)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    return done


def evaluations_of(run: Path) -> dict[str, Any]:
    evaluations: dict[str, Any] = json.loads((run / "evaluations.json").read_text())
    return evaluations
