"""A finished run goes on with more steps: the same bytes, its schedule, evaluations and log."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from support.bundles import settings
from support.lengths import first_of
from support.runs import (
    adapter,
    evaluations_of,
    here,
    json_of,
    metrics_of,
    refuses,
    replaced,
    struck,
    succeeds,
    summary_of,
    train_arguments,
)
from support.shared import Shared

from export.bundle import export_bundle
from runtime.config.train import TrainConfig
from runtime.run.schedule import learning_rate

FIRST, ALL = 3, 5
SETTINGS = {
    "lr_schedule": "constant", "eval_data": "random:9", "eval_rows": 1, "eval_every": 2,
    "save_every": 5,
}  # fmt: skip
METHODS = ["mebp", "mezo"]


def trained(shared: Shared, bundle: Path, steps: int, method: str, **more: object) -> Path:
    settings = {**SETTINGS, "method": method, **more}

    def train(path: Path) -> None:
        succeeds(*train_arguments(bundle, path, steps, **settings))

    return shared(f"more steps: {steps} of {sorted(settings.items())}", train)


@first_of("method", "mebp", "mezo")
def test_it_ends_as_if_all_steps_had_been_asked_for_at_once(
    bundle: Path, shared: Shared, tmp_path: Path, method: str
) -> None:
    whole = trained(shared, bundle, ALL, method)
    run = Path(shutil.copytree(trained(shared, bundle, FIRST, method), tmp_path / "run"))
    # killed on the way; the run has its new number of steps
    died = struck(signal.SIGKILL, f"step {ALL - 1}", "train", "--resume", run, "--steps", ALL)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert f"resuming after step {FIRST} of {ALL}" in died.stderr
    assert "schedule" not in died.stderr  # a constant rate stays
    done = succeeds("train", "--resume", run)
    assert f"of {ALL}" in done.stderr, done.stderr
    assert adapter(run) == adapter(whole)
    (save,), (expected,) = (list((one / "saves").iterdir()) for one in (run, whole))
    assert (save / "method.bin").read_bytes() == (expected / "method.bin").read_bytes()
    assert [one["loss"] for one in metrics_of(run)] == [one["loss"] for one in metrics_of(whole)]
    # the evaluation at its first end stays, by its step
    first = summary_of(trained(shared, bundle, FIRST, method))["eval"]["after"]
    assert summary_of(run)["eval"] == {**summary_of(whole)["eval"], str(FIRST): first}


def test_its_log_leads_to_the_adapter(bundle: Path, shared: Shared, tmp_path: Path) -> None:
    settings = {"method": "mezo", "lr_schedule": "linear", "warmup_steps": 2}
    run = Path(shutil.copytree(trained(shared, bundle, FIRST, **settings), tmp_path / "run"))  # type: ignore[arg-type]
    succeeds("train", "--resume", run, "--steps", ALL)
    facts = json_of("replay", run)
    assert facts["identical"] is True and facts["steps"] == ALL


@pytest.mark.parametrize("schedule", ["linear", pytest.param("cosine", marks=pytest.mark.slow)])
def test_a_falling_learning_rate_goes_on_as_over_all_steps(
    bundle: Path, shared: Shared, tmp_path: Path, schedule: str
) -> None:
    source = trained(shared, bundle, FIRST, "mebp", lr_schedule=schedule)
    run = Path(shutil.copytree(source, tmp_path / "run"))
    done = succeeds("train", "--resume", run, "--steps", ALL)
    first, more = (
        TrainConfig(
            bundle="b", data="d", learning_rate=1e-2, lr_schedule=schedule, warmup_steps=0, steps=n
        )
        for n in (FIRST, ALL)
    )
    expected = [learning_rate(first if step < FIRST else more, step) for step in range(ALL)]
    assert [one["learning_rate"] for one in metrics_of(run)] == expected
    said = f"the learning-rate schedule is now over {ALL} steps: the next step's rate is "
    assert f"{said}{expected[FIRST]:.3g}, over {FIRST} steps it would be 0" in done.stderr


def test_the_best_save_of_the_first_end_stays_the_best(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {**SETTINGS, "eval_data": "random:5", "learning_rate": 0.1, "keep": 1}
    succeeds(*train_arguments(bundle, run, FIRST, **settings), "--keep-best", "--json")
    known = evaluations_of(run)
    known["after"]["loss"] = 0.001  # as if it had been the best; no other will be so low
    replaced(run, "evaluations.json", json.dumps(known))
    expected = adapter(run / "saves" / f"step-{FIRST:08d}")
    facts = json_of("train", "--resume", run, "--steps", FIRST + 1)
    assert facts["best"] == {"step": FIRST, "loss": 0.001}
    assert adapter(run) == expected
    assert adapter(run / "saves" / f"step-{FIRST + 1:08d}") != expected


def test_a_bundle_that_has_moved_is_named(bundle: Path, shared: Shared, tmp_path: Path) -> None:
    """It must hold the weights of the run's, and ends in the same bytes."""
    whole = trained(shared, bundle, ALL, "mebp")
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(bundle, old)
    run = tmp_path / "run"
    succeeds(*train_arguments(old, run, FIRST, **SETTINGS, method="mebp"), by=here)
    old.rename(new)
    refuses(4, str(old), "train", "--resume", run, "--steps", ALL)
    other = tmp_path / "other"
    export_bundle(settings("random:tiny-llama", other, seed=1, seq_lens=(24,)))
    refused = here("train", other, "--resume", run, "--steps", ALL)
    assert refused.returncode == 4, refused.stderr
    succeeds("train", new, "--resume", run, "--steps", ALL)
    assert adapter(run) == adapter(whole)
    succeeds("train", "--resume", run)  # the run knows the new place


def test_only_what_changes_nothing_else_may_be_given(
    bundle: Path, shared: Shared, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained(shared, bundle, FIRST, "mebp"), tmp_path / "run"))
    before = (run / "config.toml").read_text()
    cases = [
        (["--steps", FIRST - 1], f"--steps {FIRST - 1} < {FIRST}, the steps that {run} has done"),
        (["--steps", "many"], "steps is 'many'"),
        (["--steps", 9, "--seed", 3], "leave out --seed"),
        (["--seed", 3], f"start another run with --adapter {run}"),
    ]
    for flags, said in cases:
        refuses(2, said, "train", "--resume", run, *flags)
        assert (run / "config.toml").read_text() == before
    same = succeeds("train", "--resume", run, "--steps", FIRST)
    assert f"give --resume {run} --steps MORE" in same.stderr
