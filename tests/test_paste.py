"""The scripts of the pages, pasted into the shells that people have.

An interactive zsh, which macOS starts, hands `# comment` to the command, and refuses a pattern that
no file matches. Each script must give its commands the same words there as in bash.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT, scripts

SCRIPTS = [(page.relative_to(ROOT), body) for page in PAGES for body in scripts(page.read_text())]
PROGRAMS = {"ondevice", "python", "python3", "pip", "make", "mpirun", "caffeinate"}
RECORD = """#!/bin/sh
printf '<%s>' "${0##*/}" "$@" >> "$RECORD"
echo >> "$RECORD"
"""
SHELLS = {
    "bash": ("bash", "--noprofile", "--norc", "-i"),
    "zsh": (
        "zsh",
        "--no-rcs",
        "-i",
        "+o",
        "zle",
    ),  # without its line editor, which needs a terminal
}


def pasted(shell: str, script: str, folder: Path) -> str:
    """The words of every command that an interactive shell starts when a script is pasted."""
    programs, record = folder / "bin", folder / "record"
    environments = folder / ".venv" / "bin"
    for place in (programs, environments):
        place.mkdir(parents=True)
    for path in (environments / "python", *(programs / name for name in PROGRAMS)):
        path.write_text(RECORD)
        path.chmod(0o755)
    (environments / "activate").touch()
    record.touch()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(folder)}
    subprocess.run(
        SHELLS[shell], input=script, cwd=folder, env=environment, capture_output=True, text=True
    )
    return record.read_text()


pytestmark = [
    pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")
    for shell in SHELLS
]


def test_scripts_give_zsh_the_words_that_they_give_bash(tmp_path: Path) -> None:
    for number, (page, script) in enumerate(SCRIPTS):
        said = [pasted(shell, script, tmp_path / f"{shell}{number}") for shell in SHELLS]
        assert said[0] == said[1], page
        lines = len(re.findall(rf"^(?:eval \"\$\()?(?:{'|'.join(PROGRAMS)})\b", script, re.M))
        assert lines <= said[0].count("\n") and said[0], f"{page}: {script}"


def test_a_comment_would_be_found(tmp_path: Path) -> None:
    script = "pip install '.[demo]'  # the demo\n"
    assert len({pasted(shell, script, tmp_path / shell) for shell in SHELLS}) == 2
