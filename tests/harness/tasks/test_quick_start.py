"""The benchmark of README's quick start: its commands, and how answers are counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.pages import README

from harness.tasks import quick_start


def test_the_commands_are_those_of_readme() -> None:
    ready, train, ask = quick_start.commands(README.read_text())
    assert "home.jsonl" in ready and "ondevice export" in ready and "generate" not in ready
    assert train[:2] == ["train", "gemma"] and ask[:2] == ["generate", "gemma"]
    assert "Turn off the bedroom fan. ->" in ask and quick_start.RIGHT in README.read_text()
    with pytest.raises(ValueError, match="no script that trains"):
        quick_start.commands("## Quick start\n```sh\nls\n```\n")


def test_answers_are_counted_and_known_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def ondevice(*words: str) -> str:
        if words[0] == "train":
            made.append(words[-3])
            return json.dumps({"final_train_loss": 0.5})
        return quick_start.RIGHT if "home-1-2-Zen" not in words[-1] else "a fan"

    monkeypatch.chdir(tmp_path)
    for name in (quick_start.THREADS_OF, quick_start.CORE_OF):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(quick_start, "ondevice", ondevice)
    core = SimpleNamespace(stdout="Zen\n")
    monkeypatch.setattr(
        quick_start,
        "subprocess",
        SimpleNamespace(run=lambda words, **_: core if "-c" in words[1] else None),
    )
    for seeds in ("0", "0,1"):
        quick_start.main(["-o", str(tmp_path / "out"), f"--seeds={seeds}", "--threads=1,2"])
    kept = json.loads((tmp_path / "out" / "quick-start.json").read_text())
    assert len(made) == len(kept["runs"]) == kept["of"] == 20 and kept["right"] == 19
    assert {run["kernel"] for run in kept["runs"]} == {"Zen"}
    assert "19 of 20: " in capsys.readouterr().out
