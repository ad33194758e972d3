"""Handles `ondevice completion`: prints a script by which a shell completes commands and options.

The scripts hold everything, and start no process while the user types.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, dataclass
from typing import ClassVar

from ondevice.cli.handlers.common import configuration
from ondevice.cli.screen import out
from runtime.config.base import Check, Config, option

SHELLS = ("bash", "zsh", "fish", "tcsh")
# metavars of values that are no files
NOT_FILES = frozenset({"N", "X", "SIZE", "SHARE", "NAMES", "NAME", "TEXT"})


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(Config):
    """The options of `ondevice completion`, which prints a script for a shell."""

    positional: ClassVar[str] = "shell"

    shell: str = option(
        MISSING,
        "shell that completes: bash, zsh, fish or tcsh",
        Check(SHELLS.__contains__, "bash, zsh, fish or tcsh"),
        metavar=f"{{{','.join(SHELLS)}}}",
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(CompletionConfig, arguments)
    script = script_of(config.shell)
    out(json.dumps({"shell": config.shell, "script": script}) if arguments.json else script)


def script_of(shell: str) -> str:
    """The script that shtab writes for one of SHELLS, from the parser of all commands."""
    import shtab

    from ondevice.cli.commands import COMMANDS
    from ondevice.cli.parser import whole_parser

    parser = whole_parser(*(command.name for command in COMMANDS))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # the parser's own help lists the commands elsewhere
            for command in action.choices.values():
                _set_values(command)
    script: str = shtab.complete(parser, shell)
    return script


def _set_values(command: argparse.ArgumentParser) -> None:
    """Tell shtab the values of each option by its metavar: choices, or names of files."""
    from shtab import FILE

    for action in command._actions:
        metavar = str(action.metavar)
        if action.nargs == 0:
            continue
        if metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
        elif metavar not in NOT_FILES and "," not in metavar:
            action.complete = FILE  # type: ignore[attr-defined]
