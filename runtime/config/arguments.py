"""The flags and the help of a command, which follow from the fields of its configuration."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from runtime.config.base import Config, Group, expanded, flag, metavar, typed


class Once(argparse.Action):
    """Stores a flag's value, and refuses a different one, since no order should decide."""

    def __call__(self, parser: Any, namespace: Any, values: Any, word: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        if before not in (None, values):
            metavar = str(self.metavar)
            takes_several = metavar == "NAMES" or ("," in metavar and metavar[0] != "{")
            more = "give one; what is usual can stand in a file for --config"
            if takes_several:
                more = f"give several together, as {before},{values}"
            parser.error(f"{word} is given twice, as {before} and as {values}; {more}")
        setattr(namespace, self.dest, values)


class _Switch(argparse.BooleanOptionalAction):
    """Turns an option on, or with --no- before its name off, and refuses both together."""

    def __call__(self, parser: Any, namespace: Any, values: Any, word: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        super().__call__(parser, namespace, values, word)
        if before not in (None, getattr(namespace, self.dest)):
            parser.error(f"{' and '.join(self.option_strings)} are given together; give one")


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Config]
) -> dict[Group, argparse._ArgumentGroup]:
    """Give `parser` (made with `add_help=False`) a flag for each field of `cls`, in groups.

    In each group what must be given comes first, then where the command writes. Every command also
    gets `--config FILE`, `--json` and `--help`. Only what the user gave is set on the namespace
    (see `given`). Nothing is checked here, so that `load` can report all problems
    together. Returns the groups.
    """
    used = {setting.metadata["group"] for setting in fields(cls) if setting.name != cls.positional}
    headings = [group for group in Group if group in used or group is Group.OTHER]
    places = {group: parser.add_argument_group(group.value) for group in headings}
    for setting in sorted(fields(cls), key=_place):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(setting)}
        place = places.get(setting.metadata["group"], parser)
        flags = sorted(
            (flag(setting.name), *setting.metadata["aliases"]), key=lambda word: word[:2] == "--"
        )
        if setting.name == cls.positional:
            nargs = "*" if str(setting.type).startswith("tuple") else "?"
            parser.add_argument(setting.name, nargs=nargs, metavar=metavar(setting), **options)
        elif setting.type in ("bool", "bool | None"):
            place.add_argument(*flags, action=_Switch, **options)
        else:
            options["action"] = "append" if setting.type == "tuple[str, ...]" else Once
            place.add_argument(*flags, dest=setting.name, metavar=metavar(setting), **options)
    other = places[Group.OTHER]
    other.add_argument(
        "--config",
        type=path,
        action=Once,
        metavar="FILE",
        help="TOML file of options, named with _ for -; flags win over it",
    )
    other.add_argument("--json", action="store_true", help="print the result as JSON")
    other.add_argument("-h", "--help", action="help", help="show this text and exit")
    return places


def path(text: str) -> Path:
    """The path that was typed."""
    return Path(expanded(text))


def usage(cls: type[Config]) -> str:
    """The usage line of a command: its required arguments, and [options]."""
    words: list[str] = []
    for setting in fields(cls):
        if setting.name == cls.positional:
            words.insert(0, typed(cls, setting))
        elif setting.default is MISSING:
            words.append(typed(cls, setting))
    return " ".join([*words, "[options]"])


def given(namespace: argparse.Namespace, cls: type[Config]) -> dict[str, Any]:
    """The fields of `cls` that the user gave on the command line: the overrides for `load`."""
    names = {setting.name for setting in fields(cls)}
    return {key: value for key, value in vars(namespace).items() if key in names}


def _place(setting: Field[Any]) -> int:
    """Where an option stands among those of its group: of lower numbers first."""
    if setting.default is MISSING:
        return 0
    return 1 if setting.name == "output" else 2


def _help(setting: Field[Any]) -> str:
    text = str(setting.metadata["help"])
    if setting.default not in (MISSING, None, ""):
        text += f" (default: {_shown(setting.default)})"
    return text.replace("%", "%%")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(_shown, value)) if isinstance(value, tuple) else str(value)
