"""What ends a command: a message without a traceback, and the exit code of its kind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.bundles import copied, manifest_of, rewrite
from support.checkpoints import weights_of, write_folder
from support.runs import COMMAND, here, ondevice, refuses

from ondevice.cli.outcome import DESCRIPTORS, outcome_of
from runtime.bundle.store import WEIGHTS, Bundle
from runtime.core.documents import MOST_DEPTH

DEEP = "[" * 100_000
NESTED = "[" * 900 + "]" * 900  # which Python reads, and code that walks it may not
ROW = ("--data=random:0", "--max-seq-length=16")


@pytest.fixture(scope="module")
def run(origin: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, with a trajectory."""
    folder = tmp_path_factory.mktemp("outcome") / "run"
    command = ["train", origin.path, *ROW, "--method=mezo", "--steps=2", "--output", folder]
    assert here(*command).returncode == 0
    return folder


def ends(code: int, told: str, *arguments: object) -> None:
    """The command says so and ends with this code, and says nothing of Python's."""
    refuses(code, told, *arguments, by=ondevice)


def written(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def piped(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


Make = Callable[[Path], Path]
WRONG_FILES: dict[str, tuple[int, str, list[str], Make]] = {
    "deep settings": (
        2, "nested more than", ["plan", "--config"], lambda d: written(d, f"a={DEEP}"),
    ),
    "dotted settings": (
        2, "nested more than", ["plan", "--config"], lambda d: written(d, "a." * 5000 + "a=1"),
    ),
    "a pipe of settings": (2, "not a file", ["plan", "--config"], piped),
    "a deep machine": (2, "nested more than", ["plan", "--machine"], lambda d: written(d, DEEP)),
    "a pipe of a machine": (2, "not a file", ["plan", "--machine"], piped),
    "a folder of a machine": (2, "a folder, not", ["plan", "--machine"], lambda d: d.parent),
    "a pipe of adapters": (
        4, "not a file", ["eval", *ROW, "--adapter"],
        lambda d: piped(d / "adapters.safetensors").parent,
    ),
    "adapters in a folder": (
        4, "a folder, not a file", ["eval", *ROW, "--adapter"],
        lambda d: written(d / "adapters.safetensors" / "x", "").parents[1],
    ),
    "a deep adapter": (
        4, "nested more than", ["eval", *ROW, "--adapter"],
        lambda d: written(d / "adapter_config.json", DEEP).parent,
    ),
    "a pipe of data": (4, "but a pipe or a", ["train", "--output", "{}.run", "--data"], piped),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FILES)
def test_files_that_are_none_or_nested_too_deeply(
    origin: Bundle, tmp_path: Path, what: str
) -> None:
    code, told, command, make = WRONG_FILES[what]
    path = make(tmp_path / "given")
    name, *options = (word.format(tmp_path / "other") for word in command)
    ends(code, told, name, origin.path, *options, path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (DEEP, f"nested more than {MOST_DEPTH} deep"),
        ('{"model_type": "qwen2", "x": ' + NESTED + "}", f"nested more than {MOST_DEPTH} deep"),
        (None, "it is a pipe, socket or device, not a file"),
        ({"num_key_value_heads": 1e999}, "num_key_value_heads is inf, not a finite number"),
        ({"vocab_size": 1e999}, "vocab_size is inf, not a finite number"),
        ({"rope_scaling": {"factor": -1e999}}, "rope_scaling.factor is -inf, not a finite"),
    ],
)
def test_configurations_that_no_model_has(tmp_path: Path, config: object, told: str) -> None:
    known, arrays = weights_of("tiny-qwen2")
    given = {**known, **config} if isinstance(config, dict) else known
    folder = write_folder(tmp_path / "model", given, arrays)
    if isinstance(config, str):
        (folder / "config.json").write_text(config)
    elif config is None:
        (folder / "config.json").unlink()
        piped(folder / "config.json")
    ends(4, told, "export", folder, "--output", tmp_path / "out")


@pytest.mark.parametrize("file", ["metrics.jsonl", "evaluations.json", "plan.json", "config.toml"])
def test_a_report_of_logs_that_are_no_text(run: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(b'\xff\xfe{"\n')
    ends(4, "is damaged", "report", tmp_path / "run", "--output", tmp_path / "page.html")


def test_replay_of_a_run_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "replayed").write_text("in the way")
    ends(5, "--output DIR writes elsewhere", "replay", tmp_path / "run")
    if os.geteuid():  # whom permissions bind
        (tmp_path / "run" / "replayed").unlink()
        (tmp_path / "run").chmod(0o500)
        ends(5, "--output DIR writes elsewhere", "replay", tmp_path / "run")
    ends(0, "", "replay", tmp_path / "run", "--output", tmp_path / "other")


@pytest.mark.parametrize(
    ("code", "command"),
    [(4, ["inspect"]), (2, ["report"]), (2, ["replay"]), (2, ["train", "--resume"])],
)
def test_names_longer_than_the_file_system_takes(code: int, command: list[str]) -> None:
    done = refuses(code, "File name too long", *command, "x" * 5000, by=ondevice)
    assert len(done.stderr) < 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="macOS has no device that is full")
@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"], []])
def test_an_output_that_is_full(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
        assert done.returncode == 5
        assert done.stderr.startswith("ondevice: No space left on device")
        assert len(done.stderr.splitlines()) == 1
        done = subprocess.run([*COMMAND, "inspect", "nothing"], stdout=full, stderr=full)
        assert done.returncode == 4


def test_an_output_that_nobody_reads(origin: Bundle) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [*COMMAND, "inspect", str(origin.path)]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_descriptors_are_refused_and_a_low_limit_is_raised(origin: Bundle) -> None:
    done = ondevice("inspect", origin.path, preexec_fn=limited(20, 20))
    assert (done.returncode, "may open 20 files (RLIMIT_NOFILE)" in done.stderr) == (5, True)
    done = ondevice("inspect", origin.path, preexec_fn=limited(20, DESCRIPTORS))
    assert done.returncode == 0, done.stderr


def test_commands_do_with_the_descriptors_that_are_asked_for(
    origin: Bundle, tmp_path: Path
) -> None:
    command = ["train", origin.path, *ROW, "--steps=1", "--output", tmp_path / "run"]
    done = ondevice(*command, preexec_fn=limited(DESCRIPTORS, DESCRIPTORS))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("problem", "code", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files", "x"), 5, "(RLIMIT_NOFILE); raise the limit"),
        (OSError(errno.EACCES, "Permission denied", "x"), 5, "Permission denied: 'x'"),
        (FileNotFoundError(errno.ENOENT, "No usable folder in ['/tmp']"), 5, "in ['/tmp']\n"),
        (MemoryError(), 3, "the system gives this process no more memory"),
    ],
)
def test_what_the_system_refuses(
    problem: Exception, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise problem

    assert outcome_of(command) == code
    assert told in capsys.readouterr().err


def test_a_working_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()

    def command() -> None:
        os.chdir("gone")
        (tmp_path / "gone").rmdir()
        Path.cwd()

    assert outcome_of(command) == 2
    assert "the working folder is gone; cd to another" in capsys.readouterr().err


def test_weights_that_are_no_numbers(origin: Bundle, tmp_path: Path) -> None:
    path = copied(origin, tmp_path / "bundle")
    document = manifest_of(path)
    weights = bytearray((path / WEIGHTS).read_bytes())
    at = document["vectors"]["model.norm.weight"]["offset"]
    weights[at : at + 4] = np.float32(np.nan).tobytes()
    (path / WEIGHTS).write_bytes(weights)
    document["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    rewrite(path, document)
    done = here("eval", path, *ROW, "--json")
    assert done.returncode == 4
    assert "1 of 1 rows a loss that is not finite" in done.stderr
    assert "NaN" not in done.stdout
    found = json.loads(done.stdout)
    assert (found["loss"], found["perplexity"], found["rows_not_finite"]) == (None, None, 1)
    assert "no finite loss (1 row of 1 without)" in here("eval", path, *ROW).stdout
    command = ["train", path, *ROW, "--eval-data=random:1", "--steps=1", "--output"]
    assert here(*command, tmp_path / "run").returncode == 1
    before = json.loads((tmp_path / "run" / "evaluations.json").read_text())["before"]
    assert before["loss"] is None
    resumed = here("train", "--resume", tmp_path / "run")
    assert (resumed.returncode, "loss of step 1 is nan" in resumed.stderr) == (1, True)


NINES = "9" * 5000


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch-size=1025"], "batch_size is 1025; it must be from 1 to 1024"),
        (["--queries=4097"], "queries is 4097; it must be from 1 to 4096"),
        (["--batch-size=1024", "--grad-accumulation=1025"], "is 1049600; a step can have 1048576"),
        ([f"--batch-size={NINES}"], "(5002 characters); it must be a whole number"),
        ([f"--budget={NINES}"], "(5002 characters); it must be a size such as"),
        (["--budget=99999999TB"], "it must be a size such as"),
        (["--epsilon=1e-9"], "epsilon is 1e-09; it must be from 1e-07 to 1; usual is 0.001"),
        ([f"--eval-data=random:{NINES}"], "has no seed of up to 20 digits"),
    ],
)
def test_absurd_settings(origin: Bundle, tmp_path: Path, options: list[str], told: str) -> None:
    done = refuses(2, told, "train", origin.path, *ROW, *options, "--output", tmp_path / "run")
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_command_without_an_output_still_works(origin: Bundle, closed: str) -> None:
    words = shlex.join([*COMMAND, "inspect", str(origin.path)])
    done = subprocess.run(["sh", "-c", f"{words} {closed}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_beyond_the_encoding_of_a_stream_ends_nothing() -> None:
    code = (
        "import sys\n"
        "from ondevice.cli.outcome import outcome_of\n"
        "sys.exit(outcome_of(lambda: print(sys.stdin.readline(), '\\u00e9 end')))"
    )
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input="h\u00e9".encode("latin-1"),
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.rstrip().endswith(b" end")


LOST = """
import signal, sys, time
from ondevice.cli.outcome import outcome_of

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def command():
    Dropped()
    if "short" not in sys.argv:
        time.sleep(9)
        print("went on")

sys.exit(outcome_of(command))
"""


@pytest.mark.parametrize("ignored", [(), (signal.SIGINT,)], ids=["heard", "SIGINT ignored"])
def test_a_signal_within_a_finalizer_ends_the_command(ignored: tuple[int, ...]) -> None:
    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    words = [sys.executable, "-c", LOST]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=ignore)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ondevice: interrupted\n")


def test_a_signal_within_the_last_finalizer_of_a_command_is_not_sent_after_it() -> None:
    words = [sys.executable, "-c", LOST, "short"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
