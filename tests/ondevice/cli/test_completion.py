"""The scripts for shells: accepted by them, and completing what the parsers take."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.runs import here

from ondevice.cli.commands import COMMANDS
from ondevice.cli.completion_config import SHELLS
from ondevice.cli.parser import command_parser, long_flags
from runtime.config.methods import METHODS


def script(shell: str, folder: Path) -> Path:
    done = here("completion", shell)
    assert done.returncode == 0, done.stderr
    path = folder / f"ondevice.{shell}"
    path.write_text(done.stdout)
    return path


def completed(path: Path, *lines: list[str]) -> list[list[str]]:
    """What bash offers for the last word of each line."""
    code = [f"source {path}"]
    for words in lines:
        typed = " ".join(f"'{word}'" for word in words)
        code += [
            f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _ondevice",
            'echo "${COMPREPLY[@]}"',
        ]
    done = subprocess.run(
        ["bash", "-u", "-c", "\n".join(code)], capture_output=True, text=True, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_commands_flags_choices_and_files(tmp_path: Path) -> None:
    path = script("bash", tmp_path)
    (tmp_path / "bundle").mkdir()
    commands, some, flags, every, choices, typed, after_equals, number, files, shells = completed(
        path,
        ["ondevice", ""],
        ["ondevice", "tra"],
        ["ondevice", "train", "b", "--lora-"],
        ["ondevice", "train", "-"],
        ["ondevice", "train", "b", "--method", ""],
        ["ondevice", "train", "b", "--method", "me"],
        ["ondevice", "train", "b", "--method", "=", "me"],
        ["ondevice", "train", "b", "--steps", ""],
        ["ondevice", "train", "bun"],
        ["ondevice", "completion", ""],
    )
    assert {command.name for command in COMMANDS} < set(commands)
    assert some == ["train"]
    assert {"--lora-rank", "--lora-alpha", "--lora-dropout"} <= set(flags)
    train = next(command for command in COMMANDS if command.name == "train")
    assert set(long_flags(command_parser(train))) <= set(every)
    assert "--resume" in every and "--no-prefetch" in every
    assert choices == list(METHODS)
    assert typed == after_equals == [name for name in METHODS if name.startswith("me")]
    assert number == []
    assert files == ["bundle"]
    assert shells == list(SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_accept_their_scripts(shell: str, tmp_path: Path) -> None:
    path = script(shell, tmp_path)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    path = script("fish", tmp_path)
    code = f"source {path}; complete -C 'ondevice tra'; complete -C 'ondevice train --device '"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words[0] == "train"
    assert sorted(words[1:]) == ["auto", "cpu", "gpu"]


def test_every_script_has_every_command_and_flag() -> None:
    for shell in SHELLS:
        done = here("completion", shell, "--json")
        found = json.loads(done.stdout)
        assert found["shell"] == shell
        for command in COMMANDS:
            assert command.name in found["script"]
            for flag in long_flags(command_parser(command)):
                assert flag.lstrip("-") in found["script"], (shell, command.name, flag)
