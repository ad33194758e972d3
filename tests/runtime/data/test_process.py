"""Functions that are called in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.errors import BundleError, DataError, UsageError
from runtime.data.limits import Limits
from runtime.data.process import call

FUNCTIONS = """
import os, signal
from pathlib import Path
from runtime.core.errors import UsageError

def told(path: Path | None, words: dict[str, str]) -> list[object]:
    print("a library says hello")
    return [None if path is None else list(os.fsencode(path)), words]

def score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())

def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

def wrong() -> None:
    raise ValueError("no number")

def counting() -> str:
    from runtime.data.process import tell
    for done in range(3):
        print("a library says hello")
        tell(done, 3)
    return "told: 5 6"

def refusing() -> None:
    raise UsageError("give another")

def large(size: int) -> str:
    return "0" * size
"""

Call = Callable[..., str]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls a function of `FUNCTIONS`."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def work(name: str, *arguments: object, **options: object) -> str:
        return call(f"functions.{name}", "the work", *arguments, **options)  # type: ignore[arg-type]

    return work


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_arguments_and_results_are_as_they_were_given(
    called: Call, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Whatever libraries print, and whatever the terminal's encoding and the path's are."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    words = {"ä": "\u2028 ü"}
    for name in (b"/tmp/\xff", "/tmp/ö".encode()):
        path = Path(os.fsdecode(name))
        assert json.loads(called("told", path, words)) == [list(name), words]
    assert json.loads(called("told", None, {})) == [None, {}]


def test_how_much_is_done_is_told_on_the_way(called: Call) -> None:
    told: list[tuple[str, int, int]] = []
    said = called("counting", progress=lambda *work: told.append(work))
    assert json.loads(said) == "told: 5 6"
    assert told == [("the work", 0, 3), ("the work", 1, 3), ("the work", 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        called("counting", progress=_interrupted)


def _interrupted(*work: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_kernel_ends_it_before_its_caller(called: Call) -> None:
    assert called("score") == "1000"


def test_a_failure_says_how_the_process_ended(called: Call) -> None:
    with pytest.raises(BundleError, match=r"SIGKILL; .* memory is short or .*ulimit -t\): it said"):
        called("killed", failure=BundleError)
    with pytest.raises(DataError, match=r"^the work failed with status 1: ValueError: no number$"):
        called("wrong")
    with pytest.raises(UsageError, match=r"^give another$"):
        called("refusing", failure=BundleError)
    with pytest.raises(DataError, match=r"memory: this process may take 0.1 GB of memory"):
        called("large", 10**9, limits=Limits(100_000_000, 60))


@pytest.mark.parametrize("python", [None, "/no/python"])
def test_a_python_that_cannot_be_started_is_named(
    called: Call, monkeypatch: pytest.MonkeyPatch, python: str | None
) -> None:
    """Where Python is part of another program, or was removed since it started."""
    monkeypatch.setattr(sys, "executable", python)
    said = f"the work takes another .*, '{python or ''}', cannot be started: "
    with pytest.raises(BundleError, match=said):
        called("score", failure=BundleError)


def test_a_process_that_ends_before_it_reads_its_arguments_is_named(called: Call) -> None:
    """They are longer than a pipe holds."""
    with pytest.raises(DataError, match=r"failed with status 1: .*no attribute 'nowhere'"):
        called("nowhere", "x" * 1_000_000)
