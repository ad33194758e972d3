"""The README and the pages of docs: their fenced scripts, and the commands of ondevice in them.

The log of experiments is no page: it keeps the names and commands of its time.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from ondevice.cli.commands import Command
from ondevice.cli.parser import whole_parser

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
LOG = ROOT / "docs" / "lab" / "log.md"
USER_PAGES = sorted(ROOT.glob("docs/*.md"))
LAB_PAGES = [page for page in sorted(ROOT.glob("docs/lab/*.md")) if page != LOG]
PAGES = (README, ROOT / "CONTRIBUTING.md", CHANGELOG, *USER_PAGES, *LAB_PAGES)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def command_parser(command: Command) -> argparse.ArgumentParser:
    """The parser of one command's options."""
    (commands,) = (
        action
        for action in whole_parser(command.name)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parser: argparse.ArgumentParser = commands.choices[command.name]
    return parser


def section(page: Path, heading: str) -> str:
    """What lies between a heading and the next one of any level."""
    text = page.read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    assert found is not None, heading
    return found[1]


def scripts(text: str) -> list[str]:
    """The fenced blocks of shell commands, continued lines as they stand."""
    return [body for language, body in FENCE.findall(text) if language == "sh"]


def lines_of(script: str) -> list[str]:
    """The lines of a script, continued ones joined."""
    lines = [line.strip() for line in script.replace("\\\n", " ").splitlines()]
    return [re.sub(r" +", " ", line) for line in lines if line]


def commands_of(page: Path) -> list[str]:
    """The lines of a page's scripts that run `ondevice`, from its name on."""
    found = [re.search(r"(?:^|[\s(])(ondevice [a-z].*)", line) for line in _lines(page)]
    return [re.sub(r'\)"$', "", one[1]) for one in found if one]


def words_of(command: str) -> list[str]:
    """The words behind `ondevice`."""
    return shlex.split(command)[1:]


def _lines(page: Path) -> list[str]:
    return [line for script in scripts(page.read_text()) for line in lines_of(script)]
