"""The scripts for shells: accepted by them, and completing what the parsers take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import command_parser
from support.runs import here, json_of

from ondevice.cli.commands import COMMANDS
from ondevice.cli.handlers.machine import SHELLS
from ondevice.cli.parser import long_flags
from runtime.config.methods import METHODS


def script(shell: str, folder: Path) -> Path:
    told = json_of("completion", shell, by=here)
    assert told["shell"] == shell
    path = folder / f"ondevice.{shell}"
    path.write_text(told["script"])
    return path


def completed(path: Path, *lines: list[str]) -> list[list[str]]:
    """What bash offers for the last word of each line."""
    code = [f"source {path}"]
    for words in lines:
        typed = " ".join(f"'{word}'" for word in words)
        code += [
            f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_ondevice",
            'echo "${COMPREPLY[@]}"',
        ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(code)], capture_output=True, text=True, cwd=path.parent
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def bash_version() -> int:
    """The major version of bash; 0 where there is none. macOS has 3."""
    if shutil.which("bash") is None:
        return 0
    asked = ["bash", "-c", "echo ${BASH_VERSINFO[0]}"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(bash_version() < 4, reason="shtab's script needs bash 4")
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    path = script("bash", tmp_path)
    (tmp_path / "bundle").mkdir()
    commands, some, at_root, lora, every, choices, typed, number, files, adapter, shells = (
        completed(
            path,
            ["ondevice", ""],
            ["ondevice", "tra"],
            ["ondevice", "--v"],
            ["ondevice", "train", "b", "--lora-"],
            ["ondevice", "train", "-"],
            ["ondevice", "train", "b", "--method", ""],
            ["ondevice", "train", "b", "--method", "me"],
            ["ondevice", "train", "b", "--steps", ""],
            ["ondevice", "train", "bun"],
            ["ondevice", "eval", "b", "--adapter", "bun"],
            ["ondevice", "completion", ""],
        )
    )
    assert commands == [command.name for command in COMMANDS]
    assert some == ["train"] and at_root == ["--version"]
    assert {"--lora-rank", "--lora-alpha", "--lora-dropout"} <= set(lora)
    train = next(command for command in COMMANDS if command.name == "train")
    assert set(long_flags(command_parser(train))) <= set(every)
    assert "--resume" in every and "--no-pack" in every and "-o" in every
    assert choices == list(METHODS)
    assert typed == [name for name in METHODS if name.startswith("me")]
    assert number == []
    assert files == adapter == ["bundle"]
    assert shells == list(SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_option_and_its_shell_accepts_it(
    shell: str, tmp_path: Path
) -> None:
    path = script(shell, tmp_path)
    for command in COMMANDS:
        assert command.name in path.read_text()
        for flag in long_flags(command_parser(command)):
            assert flag.lstrip("-") in path.read_text(), (command.name, flag)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    only_read = [] if shell == "tcsh" else ["-n"]  # tcsh's -n accepts anything
    done = subprocess.run([shell, *only_read, str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_a_script_is_written_without_loading_a_model_library() -> None:
    code = (
        "import sys; from ondevice.cli.main import main; main(['completion', 'bash']); "
        "heavy = {'mlx', 'numpy', 'transformers', 'runtime.engine', 'harness.bench'}; "
        "print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "_shtab_ondevice" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stderr
