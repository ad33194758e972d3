"""A rate that is good in a short sweep can spoil a longer run: then the next best is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.comparisons import Runs, by_rate, settings

from harness.compare.compare import compare
from harness.compare.report import to_text
from runtime.core.errors import DivergedError


class Spoils(Runs):
    """Runs, but not sweeps, at rates above `limit` end far above the loss before training."""

    def __init__(self, limit: float, end: Any = 9.0) -> None:
        super().__init__(by_rate)
        self.limit, self.end = limit, end

    def __call__(self, settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        spoilt = "stop_rise" in settings and settings["learning_rate"] > self.limit
        self.ends = lambda method, rate: self.end if spoilt else 4.8 - rate
        found = super().__call__(settings, run)
        if spoilt:
            found["stopped"] = "rise"
            (run / "summary.json").write_text(json.dumps(found))
        return found


@pytest.mark.parametrize("end", [9.0, DivergedError("the loss of step 3 is inf")])
def test_a_rate_that_spoils_its_run_gives_way_to_the_next(tmp_path: Path, end: Any) -> None:
    given = settings(tmp_path, methods="mezo", learning_rates="1e-5:3e-5:1e-4")
    runs, said = Spoils(2e-5, end), list[str]()
    report = compare(given, said.append, runs)
    word = "diverged" if isinstance(end, Exception) else "rose"
    assert [one["outcome"] for one in report["sweep"]["mezo"]["tried"]] == ["finished", word, word]
    assert report["methods"]["mezo"]["trial"]["values"]["learning_rate"] == 1e-5
    assert report["methods"]["mezo"]["last"]["loss"] == 4.8 - 1e-5
    why = "step 3 is inf" if isinstance(end, Exception) else "from 5.0000 to 9.0000 at step 4"
    assert "learning rate 0.0001, epsilon 0.001 did well in the sweep, but in its run" in (
        text := to_text(report)
    )
    assert why in text and any("taking the next best" in line for line in said)
    kept = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert kept == {
        "mezo",
        *(f"mezo-learning-rate-{rate}-epsilon-0.001.aside" for rate in ("3e-05", "0.0001")),
    }
    made = len(runs.made)
    assert compare(given, id, runs) == report
    assert len(runs.made) == made
    # killed before the first of them was set aside
    folder = tmp_path / "out" / "runs"
    shutil.rmtree(folder / "mezo")
    (folder / "mezo-learning-rate-0.0001-epsilon-0.001.aside").rename(folder / "mezo")
    assert compare(given, id, runs) == report


def test_the_last_rate_is_kept_whatever_it_does(tmp_path: Path) -> None:
    for number, rates in enumerate(("1e-5:3e-5", "3e-5")):
        given = settings(
            tmp_path, methods="mezo", learning_rates=rates, output=str(tmp_path / str(number))
        )
        report = compare(given, id, Spoils(0.0))
        assert report["methods"]["mezo"]["trial"]["values"]["learning_rate"] == float(rates[:4])
        assert report["methods"]["mezo"]["stopped"] == "rise"
        assert "rise" in to_text(report)
