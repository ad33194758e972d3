"""The help of every command: what comes first, and that a narrow terminal holds it."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

import pytest

from ondevice.cli.commands import COMMANDS, Command
from ondevice.cli.parser import command_parser
from runtime.config.base import flag


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_fits_80_columns_and_begins_with_what_is_needed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = command_parser(command).format_help()
    assert not [line for line in told.splitlines() if len(line) > 80]
    cut = re.findall(r"\B--[a-z-]*-$", told, re.MULTILINE)
    assert not cut, cut  # an option that ends a line at one of its hyphens
    config = command.config
    needed = [
        flag(setting.name)
        for setting in fields(config)
        if setting.default is MISSING and setting.name != config.positional
    ]
    _, _, main = told.partition("main options:\n")
    listed = re.findall(r"^  (?:-\w .*?)?(--[a-z-]+)", main, re.MULTILINE)
    assert listed[: len(needed)] == needed
    if any(setting.name == "output" for setting in fields(config)):
        assert listed.index("--output") <= len(needed)


def test_settings_stand_in_groups() -> None:
    told = command_parser(next(one for one in COMMANDS if one.name == "train")).format_help()
    main, _, _ = told.partition("main options:\n")[2].partition("\n\n")
    assert re.findall(r"--[a-z-]+(?= [A-Z]+ )", main) == [
        "--data", "--output", "--adapter", "--resume",
    ]  # fmt: skip
