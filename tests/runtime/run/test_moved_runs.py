"""A run whose folder is moved or removed while it is trained: it stops, and recreates nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.lengths import first_of
from support.runs import adapter

from runtime.config.train import TrainConfig
from runtime.core.errors import DataError, StorageError
from runtime.run import resume, start
from runtime.run.results import Events, Step

STEPS, SAVE_EVERY = 6, 2


def config_of(bundle: Path, run: Path, method: str) -> TrainConfig:
    return TrainConfig(
        bundle=str(bundle), data="random:5", output=str(run), method=method, max_seq_length=24,
        budget="1GB", steps=STEPS, save_every=SAVE_EVERY, learning_rate=1e-2,
        eval_data="random:9", eval_rows=1, eval_every=3,
    )  # fmt: skip


def at_step(number: int, act: Callable[[], object]) -> Events:
    """Events that act once, after a step."""

    def step(done: Step, total: int) -> None:
        if done.number == number:
            act()

    return Events(step=step)


@first_of("method", "mebp", "mezo")
def test_a_run_that_is_moved_stops_and_goes_on_elsewhere(
    bundle: Path, tmp_path: Path, method: str
) -> None:
    run, moved, whole = (tmp_path / name for name in ("run", "moved", "whole"))
    start.train(config_of(bundle, whole, method), Events())
    events = at_step(STEPS - 1, lambda: run.rename(moved))
    with pytest.raises(StorageError, match="was moved or removed while it was trained") as stopped:
        start.train(config_of(bundle, run, method), events)
    assert stopped.value.exit_code == 5
    assert not run.exists()
    assert [path.name for path in (moved / "saves").iterdir()] == ["step-00000004"]
    resume.resume(moved, Events(), {})
    assert adapter(moved) == adapter(whole)
    assert not run.exists()


# before a save, and before an evaluation
@pytest.mark.parametrize(("step", "method"), [(2, "mezo"), (3, "mebp")])
def test_a_run_that_is_removed_stays_removed(
    bundle: Path, tmp_path: Path, step: int, method: str
) -> None:
    run = tmp_path / "run"
    with pytest.raises(StorageError, match="was moved or removed"):
        start.train(config_of(bundle, run, method), at_step(step, lambda: shutil.rmtree(run)))
    assert list(tmp_path.iterdir()) == []


def test_what_takes_the_place_of_a_run_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        run.rename(tmp_path / "moved")
        run.mkdir()
        (run / "letter.txt").write_text("mine")

    with pytest.raises(StorageError, match="was moved or removed"):
        start.train(config_of(bundle, run, "mebp"), at_step(1, replace))
    assert [path.name for path in run.iterdir()] == ["letter.txt"]


def test_a_run_that_is_moved_before_it_begins_is_not_taken_back(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fail(*arguments: object) -> None:
        run.rename(tmp_path / "moved")
        run.mkdir()
        (run / "letter.txt").write_text("mine")
        raise DataError("no data")

    monkeypatch.setattr(start, "open_run_rows", fail)
    with pytest.raises(DataError, match="no data"):
        start.train(config_of(bundle, run, "mebp"), Events())
    assert [path.name for path in run.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "saves"])
def test_a_part_that_is_removed_is_not_recreated(bundle: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    path = run / name

    def remove() -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with pytest.raises(StorageError, match=name):
        start.train(config_of(bundle, run, "mebp"), at_step(3, remove))
    assert not path.exists()
