"""The commands in the README and in docs run, on tiny data in place of what the pages name.

Every `ondevice` line of a page's scripts is run here, in the page's order, in a folder that holds
what the pages presuppose: bundles, data and runs by their names. Sizes, steps and budgets are
replaced by small ones. What cannot run here stands in ELSEWHERE, with the reason.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from support.pages import PAGES, README, commands_of, scripts, words_of
from support.runs import NO_OTHERS, here
from support.shared import Shared
from support.text_bundle import text_bundle, text_checkpoint

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
ROWS = [("lamp on:", "yes"), ("fan off:", "no"), ("fan on:", "yes"), ("lamp off:", "no")]
BUNDLES = ("gemma", "my-model", "model", "gemma3-270m", "bundle", "two", "transcoded")
DATA = ("my-data", "wikitext2", "sst2", "calls")
RUNS = ("my-run", "another-run", "run", "RUN")

BENCHES = "it takes minutes; tests/harness/bench runs every benchmark on tiny shapes"
REAL = "it needs the real model; test_the_quick_start_learns runs the README's script"
NO_NAME = "llama.cpp has no name for the tiny tokenizer; tests/export/fused writes such files"
SEVERAL = "tests/runtime/run/test_several_workers.py starts several processes"
ELSEWHERE = {  # the beginning of a command: why it does not run here
    "ondevice bench": BENCHES,
    "ondevice train bundle --data my-data --parallel": SEVERAL,
    "ondevice train slice --data my-data --parallel": SEVERAL,
    "ondevice train bundle --parallel join": "tests/runtime/run/test_fleet.py joins runs",
    "ondevice doctor --bench": "tests/harness/doctor runs it on a tiny shape",
    "ondevice export gemma.gguf": REAL,
    "ondevice generate gemma --max-tokens 20": REAL,
    "ondevice fuse bundle --adapter run -o model.gguf": NO_NAME,
    "ondevice train gemma --data home.jsonl": REAL,
}
TINY = {"tiny", "tiny-mezo"}  # of the script that test_the_run_without_a_download runs
NEEDS = {"--report-to tensorboard": "tensorboardX", "--report-to wandb": "wandb"}

SMALLER = {  # what is added to a command, where later flags win
    "export": ["--seq-lens=16,32", "--no-quality", "--force"],
    "train": ["--budget=500MB", "--steps=2", "--max-seq-length=32", NO_OTHERS],
    "plan": ["--budget=500MB", "--max-seq-length=32"],
    "eval": ["--budget=500MB", "--max-seq-length=32"],
    "generate": ["--max-tokens=4"],
    "chat": ["--max-tokens=4", "--context=64"],
    "compare": [
        *("--budget=500MB", "--steps=2", "--eval-every=1", "--sweep-steps=1", "--eval-rows=1"),
        *("--max-seq-length=32", "--learning-rates=1e-4"),
    ],
}
QUICK = ("command-line.md", "data.md")  # pages whose commands the gate runs

Line = tuple[Path, str]
LINES: list[Line] = [(page, command) for page in PAGES for command in commands_of(page)]


def reason_of(command: str) -> str:
    """Why a command does not run here; empty if it does."""
    for start, reason in ELSEWHERE.items():
        if command.startswith(start):
            return reason
    return "test_the_run_without_a_download runs it" if TINY & {*words_of(command)} else ""


def runs(page: Path) -> list[str]:
    """The commands of a page that run here, in order.

    The README's scripts are run whole by tests/test_readme.py and tests/test_newcomer.py.
    """
    if page == README:
        return []
    return [command for one, command in LINES if one == page and not reason_of(command)]


@pytest.fixture(scope="module")
def stock(shared: Shared) -> Path:
    """A bundle, its checkpoint, data and a run."""

    def make(path: Path) -> None:
        text_checkpoint(path / "MODEL", TEMPLATE)
        text_bundle(path / "made", TEMPLATE)
        lines = [json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in ROWS]
        data = path / "data"
        data.mkdir()
        for name in ("train.jsonl", "valid.jsonl", "test.jsonl"):
            (data / name).write_text("".join(lines))
        (data / "test.txt").write_text("the lamp is on\n" * 9)
        flags = ("--budget=500MB", "--steps=1", "--max-seq-length=32", NO_OTHERS)
        bundle, run = path / "made" / "bundle", path / "run"
        done = here("train", bundle, "--data", data, "--output", run, *flags)
        assert done.returncode == 0, done.stderr

    return shared("what pages presuppose", make)


@pytest.fixture
def place(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything by the names that the pages give it."""
    (tmp_path / "MODEL").symlink_to(stock / "MODEL")
    for name in BUNDLES:
        (tmp_path / name).symlink_to(stock / "made" / "bundle")
    for name in DATA:
        (tmp_path / name).symlink_to(stock / "data")
    (tmp_path / "my-data.jsonl").symlink_to(stock / "data" / "train.jsonl")
    for name in RUNS:
        shutil.copytree(stock / "run", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("lamp on:\n"))  # what `ondevice chat` is told
    return tmp_path


def shrunk(command: str, place: Path) -> list[str]:
    """A command's words with small sizes, and where it writes made free."""
    words = words_of(command)
    words = [word.replace("random:gemma3-1b", "random:tiny-gemma3") for word in words]
    if "--resume" in words:
        return [*words, "--steps=3", "--budget=500MB"]
    flags = [word for word in words if word in ("-o", "--output")]
    name = words[words.index(flags[0]) + 1] if flags else "run" if words[0] == "train" else ""
    written = place / name
    if name and written.is_symlink():
        written.unlink()
    elif name and written.is_dir() and words[0] != "export":
        shutil.rmtree(written)
    small = SMALLER.get(words[0], [])
    if "--equal" in words:  # by passes, not by steps
        small = [*(one for one in small if "steps=" not in one), "--max-forward-passes=27"]
    if "--warmup-steps" in words:
        small = [*small, "--warmup-steps=1", "--eval-every=1"]
    return [*words, *small]


def check(page: Path, place: Path) -> None:
    for command in runs(page):
        for option, module in NEEDS.items():
            if option in command and importlib.util.find_spec(module) is None:
                break
        else:
            words = shrunk(command, place)
            done = here(*words)
            assert done.returncode == 0, f"{page.name}: {command}\n{' '.join(words)}\n{done.stderr}"


QUICK_PAGES = [page for page in PAGES if page.name in QUICK]
OTHER_PAGES = [page for page in PAGES if page.name not in QUICK and runs(page)]


@pytest.mark.parametrize("page", QUICK_PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, place: Path) -> None:
    assert runs(page)
    check(page, place)


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.name)
def test_commands_of_longer_pages_run(page: Path, place: Path) -> None:
    check(page, place)


def test_reasons_are_of_commands_that_there_are() -> None:
    for start in ELSEWHERE:
        assert any(command.startswith(start) for _, command in LINES), start
    assert {page.name for page in QUICK_PAGES} == {*QUICK}
    assert len(LINES) > 40
    assert len(scripts(README.read_text())) == 4, "a script that no other test runs"
