"""Bundles that are cut into slices: what two workers with a half each make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exchange import NEEDS_MPI, mpirun
from support.runs import adapter, here, metrics_of, refuses, succeeds, train_arguments
from support.shared import Shared

pytestmark = NEEDS_MPI
STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "mezo": {"method": "mezo", "parallel": "perturb=2"},
    "mebp": {"method": "mebp", "parallel": "data=2", "eval_data": "random:3", "eval_rows": 3},
}


@pytest.fixture(scope="module")
def halves(bundle: Path, shared: Shared) -> tuple[Path, Path]:
    def cut(path: Path) -> None:
        succeeds("slice", bundle, "--count", 2, "-o", path, by=here)

    folder = shared("halves of a bundle", cut)
    return folder / "1-of-2", folder / "2-of-2"


@pytest.mark.parametrize("case", CASES)
def test_halves_make_the_run_of_whole_bundles(
    bundle: Path, halves: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    runs = []
    for bundles in ((bundle, bundle), halves):
        run = tmp_path / f"run-{len(runs)}"
        runs.append(run)
        words = [train_arguments(each, run, STEPS, **CASES[case]) for each in bundles]
        done = mpirun(*[["-m", "ondevice", *each] for each in words])
        assert done.returncode == 0, done.stderr
    assert adapter(runs[0]) == adapter(runs[1])
    losses = [[step["loss"] for step in metrics_of(run)] for run in runs]
    assert losses[0] == losses[1]
