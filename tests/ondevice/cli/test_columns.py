"""All that commands print for people fits a terminal of 80 columns."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.bundles import Tiny
from support.plans import LINUX, MAC, PLENTY, plan_of, task_of
from support.runs import Terminal, here, train_arguments
from support.text_bundle import text_bundle

from harness.report.table import Table
from ondevice.cli.commands import COMMANDS
from ondevice.cli.describe import describe_plan
from runtime.core.control_characters import COLUMNS, folded
from runtime.machine.machine import Machine
from runtime.parallel.heartbeat import Heartbeat

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
ROWS = "".join(
    f'{{"prompt": "a cat", "completion": "{word} \\u65e5", "id": 1}}\n' for word in 3 * ["a", "b"]
)


def too_long(text: str) -> list[str]:
    """The lines that do not fit, but for those that a path makes long."""
    lines = [line for line in text.replace("\x1b[2K", "").splitlines() if len(line) > COLUMNS]
    return [line for line in lines if not any(len(w) > 30 and "/" in w for w in line.split())]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def fits(*words: object, code: int = 0) -> str:
    done = here(*words, stream=Terminal)
    assert done.returncode == code, done.stderr
    text = f"{done.stdout}{done.stderr}"
    assert text and not too_long(text), words
    return text


@pytest.mark.usefixtures("columns", "forked")
def test_every_command_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_bundle(tmp_path, TEMPLATE)
    Path("rows.jsonl").write_text(ROWS)
    typed = Terminal("the cat\n/unknown\n/exit\n")
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setattr("builtins.input", lambda shown: typed.readline().rstrip("\n"))
    (tmp_path / "x").mkdir()
    run = train_arguments(Path("bundle"), Path("x/run"), 4, data="rows.jsonl", **{
        "method": "mezo", "also-evaluate": "rows.jsonl", "eval-data": "rows.jsonl",
        "eval-every": 2, "patience": 2,
    })  # fmt: skip
    said = {
        "export": fits("export", "random:tiny-gemma3", "-o", "tiny", "--seq-lens=16,32"),
        "inspect": fits("inspect", "bundle", "--verify"),
        "slice": fits("slice", "bundle", "-o", "slices"),
        "plan": fits("plan", "bundle", "--max-seq-length=16"),
        "data": fits("data", "rows.jsonl", "--bundle=bundle"),
        "train": fits(*run, "--verbose", "--keep-best"),
        "replay": fits("replay", "x/run"),
        "eval": fits("eval", "bundle", "--data=rows.jsonl", "--task=labels", "--adapter=x/run"),
        "generate": fits("generate", "bundle", "--prompt=the cat \u65e5", "--max-tokens=2"),
        "chat": fits("chat", "bundle", "--max-tokens=2", "--context=100000"),
        "report": fits("report", "x/run"),
        "adapter": fits("adapter", "x/run", "--to=peft", "-o", "peft"),
        "fuse": fits("fuse", "bundle", "--adapter=x/run", "-o", "fused"),
        "trust": fits("trust", "bundle"),
        "doctor": fits("doctor"),
        "compare": fits(
            *("compare", "bundle", "--data=rows.jsonl", "--eval-data=rows.jsonl", "--steps=1"),
            *("--methods=mebp,mezo", "--learning-rates=mebp=1e-4,mezo=1e-4:3e-4"),
            *("--sweep-steps=1", "--eval-rows=1", "--max-seq-length=16"),
        ),
        "bench": fits("bench", code=2),  # with the list of them
    }
    assert said.keys() == {command.name for command in COMMANDS} - {"completion"}  # a script


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_helps_and_refusals_fit(name: str) -> None:
    fits(name, "--help")
    if name not in ("doctor", "bench"):
        fits(name, code=2)
    fits(name, "--no-such-option", code=2)


@pytest.mark.usefixtures("columns")
def test_other_texts_fit() -> None:
    fits("--help")
    fits(
        *("train", "bundle", "--data=d", "--learning-rate=1e9", "--epsilon=nan"),
        *("--budget=5", "--lr-schedule=none", "--steps=0"),
        code=2,
    )


@pytest.mark.parametrize("method", ["mebp", "mezo"])
@pytest.mark.parametrize("machine", [LINUX, MAC, msgspec.structs.replace(LINUX, llvm=True)])
def test_plans_of_every_machine_fit(tiny: Tiny, machine: Machine, method: str) -> None:
    manifest, task = tiny("gemma3").manifest, task_of(64, method, rows=16, accumulation=16)
    least = plan_of(manifest, task, PLENTY, machine).minimum_bytes
    for budget in (PLENTY, least):
        plan = plan_of(manifest, task, budget, machine).to_json()
        assert not too_long(folded(describe_plan(plan, per_block=True)))
        large = {**plan, "limit_bytes": 10**15, "chunk_rows": 10**9, "slice_columns": 10**6}
        assert not too_long(folded(describe_plan(large)))


def test_a_lost_process_is_said_in_lines_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread ends the process, so it writes on the terminal itself."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    lost = SimpleNamespace(loss=1, _describe=lambda loss: 30 * "word ")
    Heartbeat._say(cast(Any, lost), "what was saved is whole")
    said = terminal.getvalue()
    assert not too_long(said) and len(said.splitlines()) == 3


def test_words_stay_whole_where_lines_are_folded() -> None:
    words = [f"a/long-path/{n * 'x'}" for n in range(90)]
    assert folded(" ".join(words)).split() == words
    short = "a  table of   cells\n  and more\n"
    assert folded(short) == short
    indented = folded("  of a list:" + 30 * " word").splitlines()
    assert len(indented) == 3 and all(line.startswith("    w") for line in indented[1:])


def test_columns_of_a_table_without_room_follow_below() -> None:
    rows = [tuple(f"{row}.{column}" + "x" * 10 for column in range(13)) for row in range(3)]
    text = Table("cells", rows, left=2).text()
    assert not too_long(text)
    assert all(cell in text for row in rows for cell in row)
    assert text.count("2.0xxxxxxxxxx") == text.count("\n\n") + 1 == 3
