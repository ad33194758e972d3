"""A campaign's verdicts, what it keeps, and how its counts add up."""

from __future__ import annotations

import os
import signal
import sys
import tarfile
from pathlib import Path
from typing import ClassVar

import pytest
from support.mutations import Rng

from fuzz.campaign import Campaign, Case, Counts, cases_of
from fuzz.kind import Change, Kind, Read
from runtime.core.errors import BundleError, DivergedError

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a forked child cannot use Metal")

FILE = "file"


def _becomes(text: str) -> Change:
    return lambda folder, rng: (folder / FILE).write_text(text)


class Words(Kind):
    """A file that says how its reader is to end."""

    name = "words"
    known: ClassVar[dict[str, Change]] = {
        text: _becomes(text)
        for text in ("as it was", "other", "lie", "no", "burst", "end", "diverge", "odd/../name")
    }

    def prepare(self, folder: Path) -> None:
        (folder / "original").mkdir()
        (folder / "original" / FILE).write_text("as it was")

    def change(self, folder: Path, rng: Rng) -> object:
        (folder / FILE).write_text(str(rng.integers(1 << 30)))
        return "a number"

    def read(self, folder: Path, original: Path) -> Read:
        text = (folder / FILE).read_text()
        if text == "no":
            raise BundleError("it says no")
        if text == "burst":
            raise RuntimeError("a mistake")
        if text == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "diverge":
            return Read(DivergedError.exit_code)
        return Read(0, text, free=text != "lie")


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Campaign(tmp_path / "work", tmp_path / "finds", Counts())
    found.prepare(Words())
    return found


def test_verdicts(campaign: Campaign, seed: int) -> None:
    verdicts = {case.name: campaign.run(case) for case in cases_of(Words(), seed, 0, 1)}
    assert verdicts == {
        "as it was": "identical",
        "other": "other",
        "lie": "silent difference",
        "no": "refused",
        "burst": "traceback",
        "end": "signal SIGKILL",
        "diverge": "diverged",
        "odd/../name": "other",
        "": "other",
    }
    finds = [(find["name"], find["verdict"]) for find in campaign.counts.finds]
    assert finds == [(name, verdicts[name]) for name in ("lie", "burst", "end")]
    assert campaign.counts.cases("words") == len(verdicts)


def test_a_find_is_kept_with_its_input(campaign: Campaign, seed: int, tmp_path: Path) -> None:
    campaign.run(Case(Words(), seed, 0, "burst"))
    (find,) = campaign.counts.finds
    assert "RuntimeError: a mistake" in find["said"]
    with tarfile.open(find["kept"]) as kept:
        kept.extractall(tmp_path / "again")
    (path,) = (tmp_path / "again").rglob(FILE)
    assert path.read_text() == "burst"


def test_a_case_is_the_same_again(campaign: Campaign, seed: int) -> None:
    draws = [case.rng.integers(1 << 62, size=4).tolist() for case in cases_of(Words(), seed, 3, 2)]
    again = [case.rng.integers(1 << 62, size=4).tolist() for case in cases_of(Words(), seed, 3, 2)]
    assert draws == again
    assert draws[-1] != draws[-2]


def test_counts_add_up_over_runs(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    for run in range(1, 4):
        counts = Counts.read(path)
        counts.add("words", "refused")
        counts.add("words", "identical")
        counts.finds.append({"number": run})
        counts.write(path)
        assert Counts.read(path).cases("words") == 2 * run
    assert [find["number"] for find in Counts.read(path).finds] == [1, 2, 3]
