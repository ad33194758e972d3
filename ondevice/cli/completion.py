"""Scripts by which shells complete commands, flags and values, written from the parsers.

The scripts hold everything, and start no process while the user types.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from ondevice.cli.commands import COMMANDS, Command
from ondevice.cli.parser import command_parser

# metavars of values that are no files
NOT_FILES = frozenset({"N", "X", "SIZE", "SHARE", "NAMES", "TEXT"})


@dataclass(frozen=True)
class Value:
    """What can stand behind a flag, or in its own place: one of a few words, or a file."""

    choices: tuple[str, ...] = ()
    files: bool = False

    @classmethod
    def of(cls, metavar: str) -> Value:
        """The value that a metavar of the help stands for."""
        if metavar.startswith("{"):
            return cls(choices=tuple(metavar.strip("{}").split(",")))
        return cls(files=metavar not in NOT_FILES and "," not in metavar)


@dataclass(frozen=True)
class Flag:
    """A flag: its names (several for yes and no, or a short one), its help, and its value."""

    names: tuple[str, ...]
    text: str
    value: Value | None


@dataclass(frozen=True)
class Words:
    """What can be typed behind a command."""

    command: Command
    flags: tuple[Flag, ...]
    own: Value  # in place of a flag

    @classmethod
    def of(cls, command: Command) -> Words:
        """The words that the command's parser takes."""
        flags, own = [], Value()
        for action in command_parser(command)._actions:
            value = None if action.nargs == 0 else Value.of(str(action.metavar))
            if action.option_strings:
                text = (action.help or "").replace("%%", "%")
                flags.append(Flag(tuple(action.option_strings), text, value))
            elif value is not None:
                own = value
        return cls(command, tuple(flags), own)


def script_of(shell: str) -> str:
    """The script of a shell, "bash", "zsh" or "fish"."""
    words = tuple(map(Words.of, COMMANDS))
    return _WRITERS[shell](words)


def _bash(commands: tuple[Words, ...]) -> str:
    names = " ".join([*(one.command.name for one in commands), "--help", "--version"])
    cases = []
    for one in commands:
        flags = " ".join(name for flag in one.flags for name in flag.names)
        values = [
            f"            {'|'.join(flag.names)}) {_bash_value(flag.value)} ;;"
            for flag in one.flags
            if flag.value is not None
        ]
        cases += [
            f"    {one.command.name})",
            f'        flags="{flags}"',
            '        case "$before" in',
            *values,
            f"            *) {_bash_value(one.own)} ;;",
            "        esac",
            "        ;;",
        ]
    lines = "\n".join(cases)
    return f"""\
# completion of ondevice for bash
_ondevice() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local flags="" choices="" files=""
    COMPREPLY=()
    if [ "$before" = "=" ]; then
        before="${{COMP_WORDS[COMP_CWORD-2]}}"
    elif [ "$current" = "=" ]; then
        current=""
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{lines}
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
    elif [ -n "$choices" ]; then
        COMPREPLY=($(compgen -W "$choices" -- "$current"))
    elif [ -n "$files" ]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _ondevice ondevice"""


def _bash_value(value: Value) -> str:
    if value.choices:
        return f'choices="{" ".join(value.choices)}"'
    return "files=yes" if value.files else ":"


def _zsh(commands: tuple[Words, ...]) -> str:
    names = "\n".join(
        f"        {_quoted(f'{one.command.name}:{one.command.summary}')}" for one in commands
    )
    cases = []
    for one in commands:
        specs = [
            _quoted(f"{name}[{_zsh_text(flag.text)}]{_zsh_value(flag.value)}")
            for flag in one.flags
            for name in flag.names
        ]
        specs.append(_quoted(f"*{_zsh_value(one.own)}"))
        cases += [f"    {one.command.name})", f"        _arguments {' '.join(specs)}", "        ;;"]
    lines = "\n".join(cases)
    return f"""\
#compdef ondevice
# completion of ondevice for zsh
_ondevice() {{
    local -a commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
{lines}
    esac
}}
compdef _ondevice ondevice"""


def _zsh_text(text: str) -> str:
    """A flag's help within the brackets of `_arguments`."""
    return "".join(f"\\{char}" if char in "[]:\\" else char for char in text)


def _zsh_value(value: Value | None) -> str:
    if value is None:
        return ""
    if value.choices:
        return f":value:({' '.join(value.choices)})"
    return ":file:_files" if value.files else ":value:"


def _fish(commands: tuple[Words, ...]) -> str:
    lines = ["# completion of ondevice for fish", "complete -c ondevice -f"]
    start = "__fish_use_subcommand"
    for one in commands:
        name = one.command.name
        lines.append(f"complete -c ondevice -n {start} -a {name} -d {_quoted(one.command.summary)}")
    for one in commands:
        inside = _quoted(f"__fish_seen_subcommand_from {one.command.name}")
        begin = f"complete -c ondevice -n {inside}"
        for flag in one.flags:
            for name in flag.names:
                kind = "l" if name.startswith("--") else "s"
                told = f"{begin} -{kind} {name.lstrip('-')} -d {_quoted(flag.text)}"
                lines.append(told + _fish_value(flag.value))
        if one.own.choices:
            lines.append(f"{begin} -a {_quoted(' '.join(one.own.choices))}")
        elif one.own.files:
            lines.append(f"{begin} -F")
    return "\n".join(lines)


def _fish_value(value: Value | None) -> str:
    if value is None:
        return ""
    if value.choices:
        return f" -x -a {_quoted(' '.join(value.choices))}"
    return " -r -F" if value.files else " -x"


def _quoted(text: str) -> str:
    return shlex.quote(text)


_WRITERS: dict[str, Callable[[tuple[Words, ...]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
