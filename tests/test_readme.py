"""The README's commands, run as they stand, in an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def commands(heading: str) -> list[str]:
    """The lines of the first code block under a heading."""
    section = README.read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].strip().splitlines()


def test_a_minutes_run(tmp_path: Path) -> None:
    lines = commands("A minute's run")
    assert len(lines) == 8
    for line in lines:
        name, *arguments = line.split()
        assert name == "ondevice"
        done = subprocess.run(
            [sys.executable, "-m", "ondevice", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stderr)
    assert (tmp_path / "tiny-run" / "adapters.safetensors").exists()
    assert (tmp_path / "tiny-which" / "compare.json").exists()


def test_development_commands_are_the_gate() -> None:
    (test, _) = commands("Development")[0].split("#")
    assert test.strip() == "make test"
    gate = (README.parent / ".ci" / "run").read_text()
    assert "make test" in gate.splitlines()
