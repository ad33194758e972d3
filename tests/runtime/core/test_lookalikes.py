"""Paths that hold something else than a command wants: said what it is, and which command does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import weights_of, write_folder
from support.runs import here

from runtime.core.lookalikes import Kind, instead, kind_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookalikes")
    for name, file in (
        ("bundle", "manifest.json"),
        ("run", "config.toml"),
        ("adapter", "adapter_config.json"),
        ("checkpoint", "config.json"),
        ("empty", ""),
    ):
        (folder / name).mkdir()
        if file:
            (folder / name / file).write_text("{}")
    for name in ("runs", "sweep"):
        (folder / "comparison" / name).mkdir(parents=True)
    (folder / "comparison" / "config.toml").write_text("")
    (folder / "both").mkdir()
    for file in ("config.json", "model.safetensors", "adapter_config.json"):
        (folder / "both" / file).write_text("{}")
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / "m.safetensors").write_bytes(b"")
    return folder


def test_kinds_are_told_by_their_files(place: Path) -> None:
    found = {name: kind_of(place / name) for name in ("bundle", "run", "adapter", "checkpoint")}
    assert list(found.values()) == [Kind.BUNDLE, Kind.RUN, Kind.ADAPTER, Kind.CHECKPOINT]
    assert kind_of(place / "comparison") is Kind.COMPARISON
    assert kind_of(place / "empty") is Kind.FOLDER
    assert kind_of(place / "none") is Kind.NOTHING
    assert kind_of(place / "m.gguf") is Kind.GGUF
    assert kind_of(place / "m.safetensors") is Kind.FILE
    assert instead(place / "bundle", Kind.BUNDLE) == ""
    assert instead(place / "empty", Kind.BUNDLE) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "none"], "none is no bundle: there is no such folder (a bundle is made by: "),
        (["inspect", "Qwen/Qwen2.5-0.5B"], "ondevice export Qwen/Qwen2.5-0.5B -o BUNDLE"),
        (
            ["inspect", "checkpoint"],
            "it is a Hugging Face checkpoint; make a bundle of it: ondevice",
        ),
        (["inspect", "m.gguf"], "it is a GGUF file; make a bundle of it: ondevice export m.gguf"),
        (["inspect", "run"], "it is a run; go on with it by ondevice train --resume run"),
        (["inspect", "adapter"], "it is an adapter; use it with its bundle"),
        (["inspect", "empty"], "empty is no bundle: it has no manifest.json"),
        (["train", "--resume", "bundle"], "holds no run to resume: it is a bundle; a bundle is"),
        (["train", "--resume", "none"], "holds no run to resume: there is no such folder"),
        (["replay", "bundle"], "bundle is no run: it is a bundle"),
        (["replay", "none"], "none is no run: there is no such folder"),
        (["train", "--resume", "comparison"], "to resume: it is a comparison; its runs are in com"),
        (["report", "comparison"], "it is a comparison; its runs are in comparison/runs, and the"),
        (["replay", "comparison"], "comparison is no run: it is a comparison"),
        (["report", "bundle"], "bundle holds no run: it is a bundle"),
        (["export", "bundle", "-o", "x"], "bundle is no checkpoint: it is a bundle"),
        (["export", "comparison", "-o", "x"], "comparison is no checkpoint: it is a comparison; "),
        (["export", "run", "-o", "x"], "run is no checkpoint: it is a run"),
        (["export", "both", "-o", "x"], "a Hugging Face checkpoint and an adapter in one folder; "),
    ],
)
def test_messages_say_what_it_is(
    words: list[str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    done = here(*words)
    assert done.returncode in (2, 4)
    assert said in done.stderr, done.stderr


def test_an_architecture_is_named_before_missing_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    done = here("export", tmp_path, "-o", tmp_path / "b")
    assert done.returncode == 4
    assert "architecture 'whisper' is not supported: mlx-lm has no class for it" in done.stderr
    config, arrays = weights_of("tiny-qwen2")
    folder = write_folder(tmp_path / "known", config, arrays)
    (folder / "model.safetensors").unlink()
    assert "no model*.safetensors" in here("export", folder, "-o", tmp_path / "b").stderr
