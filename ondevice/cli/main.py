"""The entry point of the command line: parses arguments, runs a command, returns an exit code."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ondevice.cli.commands import COMMANDS, Command
from ondevice.cli.outcome import outcome_of
from ondevice.config.base import Group, add_arguments, usage
from ondevice.errors import UsageError
from ondevice.version import __version__

# what users of mlx-lm and PEFT type
FLAGS_ELSEWHERE = {
    "--iters": "--steps",
    "--max-steps": "--steps",
    "--lr": "--learning-rate",
    "--adapter-path": "--adapter",
    "--lora-r": "--lora-rank",
    "--target-modules": "--lora-targets",
    "--lora-target-modules": "--lora-targets",
    "--num-layers": "--lora-layers",
    "--use-rslora": "--rslora",
}
NO_DORA = (
    "DoRA is not supported: it divides every output by the norm of a row of the merged weight "
    "W + s BA, which takes another pass over the dequantized weights after each update, and trains "
    "one more tensor for each matrix; no operation of a bundle does this. Use LoRA, with --rslora "
    "where the rank is high"
)
REFUSED = {"--dora": NO_DORA, "--use-dora": NO_DORA}
START = """\
a first run:
  ondevice export MODEL -o bundle
  ondevice train bundle --data my-data.jsonl --budget 500MB -o run
  ondevice generate bundle --adapter run --prompt "Once upon a time"

`ondevice COMMAND --help` shows a command's options.
exit codes: 0 done, 2 wrong usage, 3 memory budget, 4 bad bundle or data, 5 storage,
130 interrupted by Ctrl-C, SIGTERM or SIGHUP, 1 anything else
"""


class _Parser(argparse.ArgumentParser):
    """Reports its errors as `UsageError`, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own says nothing of a full disk


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return outcome_of(partial(_run, words))


def _run(words: list[str]) -> None:
    parser = _parser(words[0] if words else "")
    if not words:
        parser.print_help()
        sys.exit(UsageError.exit_code)
    _check_command(words[0])
    arguments, unknown = parser.parse_known_args(words)
    if unknown or "handler" not in arguments:  # options without a command have none
        raise UsageError(_not_known(unknown or words, getattr(arguments, "parser", parser)))
    arguments.handler(arguments)


def _parser(typed: str) -> argparse.ArgumentParser:
    """All commands, with the options of the one that was typed."""
    parser = _Parser(
        prog="ondevice",
        usage="ondevice COMMAND [options]",
        description="Fine-tune language models on this device, inside a memory budget.",
        epilog=START,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    commands = parser.add_subparsers(
        title="commands", prog="ondevice", metavar="COMMAND", parser_class=_Parser
    )
    for command in COMMANDS:
        if command.name == typed:
            _add_command(commands, command)
        else:
            commands.add_parser(command.name, help=command.summary, add_help=False)
    other = parser.add_argument_group(Group.OTHER.value)
    version = f"ondevice {__version__}"
    other.add_argument("--version", action="version", version=version, help="show the version")
    other.add_argument("-h", "--help", action="help", help="show this text and exit")
    return parser


def _add_command(commands: argparse._SubParsersAction[_Parser], command: Command) -> None:
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
    )
    groups = add_arguments(parser, config)
    if command.resumes:
        groups[Group.MAIN].add_argument(
            "--resume",
            metavar="RUN",
            type=Path,
            help="go on with an interrupted run, with its own settings, or with a finished one and "
            "more --steps; only --steps, --patience, --budget and --device may be given beside it, "
            "and the bundle, where it has moved",
        )
        groups[Group.OTHER].add_argument(
            "--verbose", action="store_true", help="print the memory plan before training starts"
        )
    parser.set_defaults(handler=command.run, parser=parser)


def _alike(word: str, words: list[str]) -> list[str]:
    """The word that is most like another, if one is."""
    import difflib  # a quarter of a megabyte, which training would have to hold

    return difflib.get_close_matches(word, words, n=1)


def _check_command(word: str) -> None:
    names = [command.name for command in COMMANDS]
    if word.startswith("-") or word in names:
        return
    near = _alike(word, names)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    raise UsageError(f"no command {word!r}; {hint}")


def _not_known(words: list[str], parser: argparse.ArgumentParser) -> str:
    """The message for arguments that a command does not have, with similar ones."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    for flag in flags:
        if flag in REFUSED:
            return f"{flag}: {REFUSED[flag]}"
    there = [name for name in parser._option_string_actions if name.startswith("--")]
    near = [FLAGS_ELSEWHERE.get(flag) for flag in flags if FLAGS_ELSEWHERE.get(flag) in there]
    near += [name for flag in flags for name in _alike(flag, there)]
    meant = f"did you mean {' or '.join(dict.fromkeys(map(str, near)))}?"
    hint = meant if near else f"see: {parser.prog} --help"
    return f"unrecognized arguments: {' '.join(words)}; {hint}"
