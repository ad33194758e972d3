"""The parser of the command line: all commands in groups, and the options of one of them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any, NoReturn

from ondevice.cli.commands import COMMANDS, Command, CommandGroup
from runtime.config.arguments import Once, add_arguments, path, usage
from runtime.config.base import SIZE, Group, flag, is_size
from runtime.core.errors import UsageError
from runtime.core.version import __version__

ABOUT = "Fine-tune language models on this device, inside a memory budget."
START = """\
a first run:
  ondevice export MODEL -o bundle
  ondevice train bundle --data my-data.jsonl --budget 500MB -o run
  ondevice generate bundle --adapter run --prompt "Once upon a time"

`ondevice COMMAND --help` shows a command's options.
exit codes: 0 done, 2 wrong usage, 3 memory budget, 4 bad bundle or data,
5 storage, 130 interrupted by Ctrl-C, SIGTERM or SIGHUP, 1 anything else
"""


class Parser(argparse.ArgumentParser):
    """Reports its errors as `UsageError`, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own says nothing of a full disk


class Help(argparse.HelpFormatter):
    """Breaks lines at spaces, and lists that are longer than a line at commas, never at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        from textwrap import wrap

        words = [
            word.replace(",", ", ").strip() if len(word) > width else word for word in text.split()
        ]
        return wrap(" ".join(words), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(f"{indent}{line}" for line in self._split_lines(text, width))


def whole_parser(*typed: str) -> Parser:
    """All commands, with the options of those that were typed."""
    parser = Parser(
        prog="ondevice",
        usage="ondevice COMMAND [options]",
        description=f"{ABOUT}\n\n{_groups()}",
        epilog=START,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    commands = parser.add_subparsers(prog="ondevice", metavar="COMMAND", help=argparse.SUPPRESS)
    for command in COMMANDS:
        if command.name in typed:
            _add_command(commands, command)
        else:
            commands.add_parser(command.name, add_help=False)
    other = parser.add_argument_group(Group.OTHER.value)
    version = f"ondevice {__version__}"
    other.add_argument("--version", action="version", version=version, help="show the version")
    other.add_argument("-h", "--help", action="help", help="show this text and exit")
    return parser


def long_flags(parser: argparse.ArgumentParser) -> list[str]:
    """All flags of a parser that are words."""
    return [
        name for action in parser._actions for name in action.option_strings if name[:2] == "--"
    ]


def check_sizes(words: list[str]) -> None:
    """Raise UsageError for a size in two words, whose unit would be taken for a bundle."""
    sizes = {
        flag(setting.name)
        for command in COMMANDS
        if command.name == words[0]
        for setting in fields(command.config)
        if setting.metadata["check"] is SIZE
    }
    words = [part for word in words for part in word.split("=", 1)]
    for name, number, unit in zip(words, words[1:], words[2:], strict=False):
        is_name = not unit.isalpha() or unit in "bB"  # a name, rather
        if name in sizes and not is_name and is_size(number + unit) and not is_size(number):
            raise UsageError(
                f"{name} {number} {unit}: a size is one word, such as {name} {number}{unit}"
            )


def _groups() -> str:
    """The commands with their summaries, group by group."""
    width = max(len(command.name) for command in COMMANDS)
    parts = []
    for group in CommandGroup:
        lines = [
            f"    {command.name:{width}}  {command.summary}"
            for command in COMMANDS
            if command.group is group
        ]
        parts.append("\n".join([f"{group}:", *lines]))
    return "\n\n".join(parts)


def _add_command(
    commands: argparse._SubParsersAction[Parser], command: Command
) -> argparse.ArgumentParser:
    summary = command.summary[0].upper() + command.summary[1:] + "."
    config = command.config
    line = f"ondevice {command.name} {usage(config)}"
    if command.resumes:
        line += "\n       ondevice train --resume RUN [BUNDLE] [--steps N] [--budget SIZE] ..."
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=f"{summary} {command.more}",
        usage=line,
        allow_abbrev=False,
        add_help=False,
        formatter_class=Help,
    )
    groups = add_arguments(parser, config)
    if command.resumes:
        groups[Group.MAIN].add_argument(
            "--resume",
            metavar="RUN",
            type=path,
            action=Once,
            help="go on with an interrupted run, with its own settings, or with a finished one and "
            "more --steps or --epochs; only these, --patience, --budget, --device and --parallel "
            "may be given beside it, and the bundle, where it has moved",
        )
        groups[Group.MEMORY].add_argument(
            "--verbose", action="store_true", help="print the memory plan before training starts"
        )
    parser.set_defaults(handler=command.run, parser=parser)
    return parser
