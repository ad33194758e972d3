"""Control groups that bound memory, where this machine lets us make them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PLACES = (  # where groups are made, the file of a group's limit, and those of further limits
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes",)),
    (Path("/sys/fs/cgroup"), "memory.max", ()),
)
ENTERED = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"


class Group:
    """A control group with a limit on memory, without swap."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` in the group."""
        enter = [sys.executable, "-c", ENTERED, str(self.folder / "cgroup.procs")]
        command = [*enter, sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)

    @property
    def killed(self) -> bool:
        """Whether the kernel has ended a process because the limit was reached."""
        facts = (self.folder / "memory.oom_control", self.folder / "memory.events")
        lines = [line for path in facts if path.exists() for line in path.read_text().splitlines()]
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Group]:
    """A group that is removed afterwards; the test is skipped where none can be made.

    macOS has none, and plans there are for its own heap and BLAS, which the imitation lacks.
    """
    if sys.platform != "linux":
        pytest.skip("control groups are Linux's")
    for place, limit, others in PLACES:
        folder = place / f"ondevice-{name}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / limit).exists():
                continue
            (folder / limit).write_text(str(limit_bytes))
            for other in others:
                if (folder / other).exists():  # where swap is counted
                    (folder / other).write_text(str(limit_bytes))
            yield Group(folder)
            return
        finally:
            folder.rmdir()
    pytest.skip("no control group that bounds memory can be made here")
