"""The entry point of the command line: parses arguments, runs a command, returns an exit code."""

from __future__ import annotations

import sys
from functools import partial

from ondevice.cli.commands import COMMANDS
from ondevice.cli.outcome import outcome_of
from ondevice.cli.parser import check_sizes, long_flags, whole_parser
from runtime.core.errors import UsageError
from runtime.parallel.launch import launched
from runtime.parallel.watch import watch_end


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return outcome_of(partial(_run, words))


def _run(words: list[str]) -> None:
    parser = whole_parser(*words[:1])
    if not words:
        parser.print_help()
        sys.exit(UsageError.exit_code)
    _check_command(words[0])
    check_sizes(words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown or "handler" not in arguments:  # options without a command have none
        from runtime.config.suggestions import not_known  # training need not hold its tables

        typed = getattr(arguments, "parser", parser)
        raise UsageError(not_known(unknown or words, long_flags(typed), typed.prog, _having))
    arguments.handler(arguments)
    if launched().size > 1:
        watch_end()


def _having(flag: str) -> list[str]:
    """The names of the commands that have an option."""
    return [
        command.name
        for command in COMMANDS
        if flag.removeprefix("--").replace("-", "_") in command.config.__dataclass_fields__
    ]


def _check_command(word: str) -> None:
    names = [command.name for command in COMMANDS]
    if not word.startswith("-") and word not in names:
        from runtime.config.suggestions import no_command

        raise UsageError(no_command(word, names))
