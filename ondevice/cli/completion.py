"""Scripts by which shells complete commands, options and values: what shtab writes of our parser.

The scripts hold everything, and start no process while the user types.
"""

from __future__ import annotations

import argparse

import shtab

from ondevice.cli.commands import COMMANDS
from ondevice.cli.parser import whole_parser

# metavars of values that are no files
NOT_FILES = frozenset({"N", "X", "SIZE", "SHARE", "NAMES", "NAME", "TEXT"})


def script_of(shell: str) -> str:
    """The script of a shell, one of `config.completion.SHELLS`."""
    parser = whole_parser(*(command.name for command in COMMANDS))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # the parser's own help lists the commands elsewhere
            for command in action.choices.values():
                _set_values(command)
    script: str = shtab.complete(parser, shell)
    return script


def _set_values(command: argparse.ArgumentParser) -> None:
    """Tell shtab what can stand behind each option, which its metavar says."""
    for action in command._actions:
        metavar = str(action.metavar)
        if action.nargs == 0:
            continue
        if metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
        elif metavar not in NOT_FILES and "," not in metavar:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
