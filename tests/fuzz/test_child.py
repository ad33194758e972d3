"""How a case ended is told apart: by itself, refused, by a signal, in a traceback, or too late."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support.forks import ROOT, import_path
from support.runs import python

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a forked child cannot use Metal")

# forked where nothing has computed with MLX yet
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2].split(os.pathsep)
from fuzz import child
from fuzz.child import in_child
from runtime.core.errors import BundleError

def fine(tell):
    tell([1, "two"])
    print("said")
    return 0

def refuses(tell):
    raise BundleError("damaged")

def raises(tell):
    raise RuntimeError("a mistake")

def panics(tell):
    raise BaseException("as Rust does")

def dies(tell):
    os.kill(os.getpid(), signal.SIGSEGV)

def computes(tell):
    while True:
        pass

def waits(tell):
    os.mkfifo("fifo")
    open("fifo")

def allocates(tell):
    held = b"x" * (1 << 40)

def leaves_a_process(tell):
    if os.fork() == 0:
        signal.pause()
    tell("alive")
    return 0

class AfterTheEnd:
    # a clock that runs from look to look, and only when the child has ended
    looks = 0

    def monotonic(self):
        self.looks += 1
        if self.looks > 1:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return self.looks / 3

os.chdir(sys.argv[1])
SHORT = {"waits": 1, "leaves_a_process": 1}  # seconds until SIGKILL
works = (fine, refuses, raises, panics, dies, computes, waits, allocates, leaves_a_process)
ends = {}
for work in works:
    name = work.__name__
    if work is leaves_a_process:
        child.time = AfterTheEnd()
    found = in_child(work, Path(name).absolute(), 1, SHORT.get(name))
    ends[name] = [found.told, found.said, found.code, found.signal, found.late]
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each piece of work ended, by its name."""
    done = python(SCRIPT, tmp_path_factory.mktemp("works"), import_path(ROOT))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("work", "told", "said", "code", "signal", "late"),
    [
        ("fine", [[1, "two"]], "said\n", 0, 0, False),
        ("refuses", [], "ondevice: damaged\n", 4, 0, False),
        ("raises", [], "RuntimeError: a mistake\n", 99, 0, False),
        ("panics", [], "BaseException: as Rust does\n", 99, 0, False),
        ("dies", [], "", 0, 11, False),
        ("computes", [], "", 0, 24, True),
        ("waits", [], "", 0, 9, False),
        ("allocates", [], "MemoryError\n", 99, 0, False),
        ("leaves_a_process", ["alive"], "", 0, 0, False),
    ],
)
def test_how_it_ended(
    ends: dict[str, Any], work: str, told: object, said: str, code: int, signal: int, late: bool
) -> None:
    assert ends[work][0] == told
    assert ends[work][1].endswith(said)
    assert ends[work][2:] == [code, signal, late]
