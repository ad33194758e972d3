"""The small sets of the measured defaults: their rows, and the runs over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.tasks import defaults
from harness.tasks.small_sets import write_sets

ROWS = {"support": (144, 36), "style": (32, 24), "calls": (32, 24), "sentiment": (32, 40)}


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    for name in ("train", "dev"):
        rows = [f"the {name} film number {index}\t{index % 2}" for index in range(50)]
        rows.append(f"{'much too long ' * 9}\t1")
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return tmp_path


def test_nothing_that_is_held_out_is_trained_on(sst2: Path, tmp_path: Path) -> None:
    first, again = (write_sets(tmp_path / name, sst2) for name in "ab")
    for name, counts in ROWS.items():
        files = [first[name] / f"{split}.jsonl" for split in ("train", "valid")]
        train, valid = ([json.loads(line) for line in file.open()] for file in files)
        assert (len(train), len(valid)) == counts
        prompts = {row["prompt"] for row in train}
        assert not prompts & {row["prompt"] for row in valid}
        assert files[0].read_bytes() == (again[name] / "train.jsonl").read_bytes()
        assert all(len(row["prompt"].split()) < 20 for row in train)


def test_runs_that_are_known_are_kept(
    sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def ondevice(*words: str) -> str:
        made.append(words)
        trained = {"final_train_loss": 1.0, "seconds": 2.0, "step_s_median": 0.1}
        return json.dumps(trained if words[0] == "train" else {"loss": 2, "exact": 0.5, "rows": 3})

    monkeypatch.setattr(defaults, "ondevice", ondevice)
    command = ["a-bundle", "-o", str(tmp_path / "out"), "--sst2", str(sst2), "--only", "calls"]
    defaults.main(command)
    first = len(made)
    rates = [word for words in made for word in words if word.startswith("--learning-rate")]
    assert len({*rates}) == 3 and first == 2 * len(rates) + 1  # once without training
    assert "--steps=96" in made[0] and made[1][:2] == ("eval", "a-bundle")
    defaults.main(command)
    assert len(made) == first
