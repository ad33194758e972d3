"""The stages of the table: what is run, what is not run again, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.tasks.bfcl import __main__ as command
from harness.tasks.bfcl import table


class Commands:
    """Stands in for the command line; `right` of 8 live answers are right after each training."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> str:
        self.said.append(arguments)
        if arguments[0] == "train":
            return json.dumps({"steps": 3, "seconds": 12.3, "final_train_loss": 0.5, "data": {}})
        trained = next((one for one in arguments if one.startswith("--adapter=")), "")
        right = 4 if trained.endswith("mebp") else 2 if trained else 0
        if "--task=bfcl" not in arguments:
            return json.dumps(
                {"loss": 1.25, "accuracy": 0.5, "exact": 0.125, "scored_tokens": 9, "rows": 8}
            )
        counts: dict[str, Any] = {
            "questions": 8, "right": right, "accuracy": right / 8, "malformed": 1, "unjudged": 0,
            "cut": 2,
        }  # fmt: skip
        return json.dumps({**counts, "live": counts, "categories": {"live_simple": counts}})


def test_each_stage_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, data, out = Commands(), tmp_path / "rows", tmp_path / "out"
    monkeypatch.setattr(table, "ondevice", commands)
    given = ["table", "gemma", f"--data={data}", f"--output={out}", "--questions=8", "--seed=5"]
    assert command.main(given) == 4
    assert "let prepare write the folder" in capsys.readouterr().err
    data.mkdir()
    (data / "rows.json").write_text('{"bfcl_eval": "1"}')
    assert command.main(given) == 0
    text = capsys.readouterr().out
    lines = {line[:24].strip(): line[24:].split("  ") for line in text.splitlines()}
    assert [one.strip() for one in lines["live, all"] if one] == [
        *("0 of 8 (0.0%)", "2 of 8 (25.0%)", "4 of 8 (50.0%)")
    ]
    assert lines["standard error"][-1].strip() == "17.7%"
    assert lines["the paper's 1B model"][-1].strip() == "33.01%"
    report = json.loads((out / "bfcl.json").read_text())
    assert report["training"]["mezo"]["settings"]["learning-rate"] == 3e-5
    assert report["stages"]["mebp"]["right_answers"]["loss"] == 1.25
    trainings = [one for one in commands.said if one[0] == "train"]
    assert [("--method=mezo" in one, "--seed=5" in one, "--pack" in one) for one in trainings] == [
        *((True, True, True), (False, True, True))
    ]
    asked = [one for one in commands.said if one[0] == "eval"]
    assert len(asked) == 6 and all("--eval-rows=8" in one for one in asked)
    again = len(commands.said)
    assert command.main(given) == 0 and len(commands.said) == again
    (out / "mezo.calls.json").unlink()
    assert command.main(given) == 0 and len(commands.said) == again + 1
    assert "--task=bfcl" in commands.said[-1] and f"--adapter={out / 'mezo'}" in commands.said[-1]
